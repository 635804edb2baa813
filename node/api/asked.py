"""What a chat completion request may ask for, and the answer to everything else."""

import random
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from node.api.errors import ApiError
from rl.rollouts import Sampling

MAX_SAMPLES = 8
MAX_MESSAGES = 1024
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256

_COLDEST = 0.01
"""Below this a temperature is taken for 0: the likeliest token has all the probability either way."""

_SMALLEST_TOP_P = 1e-3

_LARGEST_SEED = 2**63 - 1

_IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Parameters that change nothing about the answer."""

_IGNORED_IN_MESSAGE = {"name"}

_AS_IF_UNSET: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
"""Values of parameters that are not supported otherwise, and that ask for what is done anyway."""


def _text(value: Any) -> str:
    """The text of a message's content: a string, or a list of parts that are text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        # A TypeError would escape pydantic.
        raise ValueError("must be a string or a list of text parts")  # noqa: TRY004
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError('each part must be {"type": "text", "text": "..."}: this model reads text alone')
        texts.append(part["text"])
    return "".join(texts)


def _stops(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


class _Asked(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class Turn(_Asked):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)]


class StreamOptions(_Asked):
    """`stream_options`."""

    include_usage: bool = False


class ChatRequest(_Asked):
    """A request that can be answered. Fields that a client sends as null are as if not sent."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
        BeforeValidator(_stops),
        Field(max_length=MAX_STOPS),
    ] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    def turns(self) -> list[dict[str, str]]:
        """The messages as a chat template reads them."""
        return [{"role": "system" if t.role == "developer" else t.role, "content": t.content} for t in self.messages]

    def sampling(self, longest: int) -> Sampling:
        """How one answer is drawn, of at most `longest` tokens."""
        asked = self.max_completion_tokens or self.max_tokens or longest
        temperature = self.temperature if self.temperature >= _COLDEST else 0.0
        return Sampling(1, min(asked, longest), temperature, max(self.top_p, _SMALLEST_TOP_P))

    def seeds(self) -> list[int]:
        """One for each of the `n` answers: the same for the same `seed`, and others each time without."""
        first = random.getrandbits(63) if self.seed is None else self.seed
        return [(first + number) % (_LARGEST_SEED + 1) for number in range(self.n)]


def parse(body: bytes) -> ChatRequest:
    """The request in `body`. Raises ApiError, which names the field at fault."""
    try:
        # Refuses lone surrogates and deep nesting, which the standard library's parser lets through or dies of.
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    given = {key: field for key, field in value.items() if field is not None}
    _refuse_others(given, ChatRequest.model_fields, _IGNORED, "")
    messages = given.get("messages")
    if isinstance(messages, list):
        for number, message in enumerate(messages[:MAX_MESSAGES]):
            if isinstance(message, dict):
                _refuse_others(message, Turn.model_fields, _IGNORED_IN_MESSAGE, f"messages.{number}.")
    try:
        request = ChatRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{param}: {what}", code="invalid_value", param=param) from error
    if request.stream and request.n > 1:
        raise ApiError(400, "n: a stream holds one answer; ask for n = 1", code="invalid_value", param="n")
    return request


def _refuse_others(given: dict[str, Any], known: Any, ignored: set[str], where: str) -> None:
    """Raises ApiError for a parameter that would be left undone, unless its value asks for nothing."""
    for key, value in given.items():
        if key in known or key in ignored:
            continue
        # 0 and 0.0 are equal to False.
        if value in (None, False, "", [], {}) or value in _AS_IF_UNSET.get(key, ()):
            continue
        name = f"{where}{key[:64]}"
        raise ApiError(400, f"{name} is not supported by this endpoint", code="unsupported_parameter", param=name)
