"""Errors as OpenAI's clients read them."""

from starlette.responses import JSONResponse

RETRY_SECONDS = 5
"""When to come back. A learner takes about as long to load, or a round to go on."""


class ApiError(Exception):
    """A request that gets no answer. `code` is for programs, `param` names the field at fault."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, again: bool = False
    ) -> None:
        """`again`: the same request may well be answered a little later."""
        super().__init__(message)
        self.status, self.code, self.param, self.again = status, code, param, again

    @property
    def body(self) -> dict[str, object]:
        """As it is sent."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole response."""
        headers = {"retry-after": str(RETRY_SECONDS)} if self.again else {}
        if self.status >= 500 and not self.again:
            # Official clients would ask twice more by themselves, and a request that ended the learner would end the
            # next one too.
            headers["x-should-retry"] = "false"
        return JSONResponse(self.body, self.status, headers)
