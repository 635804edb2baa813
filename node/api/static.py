"""The dashboard's files, read once at the start: what can be asked for is exactly what is in this table."""

from collections.abc import Awaitable, Callable, Iterator
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def pages() -> dict[str, tuple[bytes, str]]:
    """Bytes and media type of each file, by its path on the server."""
    return dict(_pages())


def routes(table: dict[str, tuple[bytes, str]]) -> list[Route]:
    """One for each file."""
    return [Route(path, _serving(*page), methods=["GET"]) for path, page in table.items()]


def _pages() -> Iterator[tuple[str, tuple[bytes, str]]]:
    root = files("node") / "web"
    for folder, prefix in ((root, "/"), (root / "vendor", "/vendor/")):
        for file in folder.iterdir():
            kind = next((kind for suffix, kind in _TYPES.items() if file.name.endswith(suffix)), None)
            if kind is not None:
                # A page has its name without the ending.
                name = "" if file.name == "index.html" else file.name.removesuffix(".html")
                yield prefix + name, (file.read_bytes(), kind)


def _serving(data: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        # A new version of the node is seen at once.
        return Response(data, headers={"content-type": kind, "cache-control": "no-cache"})

    return serve
