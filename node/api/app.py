"""The application: routes, who may ask, and what an error looks like."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from node.api.errors import ApiError
from node.api.guard import Guard, Rules


def make_app(routes: Sequence[BaseRoute], rules: Rules) -> Starlette:
    """An application that answers those whom `rules` let in."""
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, rules=rules)],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _fault},
    )


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Not `request.url`, which cannot be had of a query that is no UTF-8.
    response = ApiError(error.status_code, f"{request.method} {request.scope['path']}: {error.detail}").response()
    response.headers.update(error.headers or {})
    return response


async def _fault(request: Request, error: Exception) -> Response:
    """A fault of ours. It is logged by the server that gets it next, with its traceback."""
    return ApiError(500, "a fault of the node, see its log", code="internal_error").response()
