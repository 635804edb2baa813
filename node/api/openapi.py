"""The description of the HTTP interface: the OpenAPI document, and `docs/api.md` made from the same table."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from node.api import models

PREFIX = "/api/v1"


@dataclass(frozen=True)
class Operation:
    """One endpoint. `query`, `body` and `answer` are models; `media` is what comes where that is no JSON."""

    method: str
    path: str
    name: str
    summary: str
    query: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    media: str = "application/json"
    errors: tuple[int, ...] = ()
    status: int = 200
    body: type[BaseModel] | None = None


def _get(name: str, summary: str, answer: type[BaseModel], query: type[BaseModel] | None = None) -> Operation:
    errors = (*((400,) if query else ()), *((503,) if name in ("rollouts", "firsts") else ()))
    return Operation("GET", f"{PREFIX}/{name}", name, summary, query, answer, errors=errors)


def _post(name: str, summary: str) -> Operation:
    errors = () if name == "stop" else (409,)
    return Operation("POST", f"{PREFIX}/{name}", name, summary, None, models.Done, status=202, errors=errors)


def _contribute(name: str, summary: str, answer: type[BaseModel], body: type[BaseModel] | None = None) -> Operation:
    path, errors = f"{PREFIX}/contribute/{name}", (400, 404, 408, 413, 503) if body else (503,)
    return Operation("POST", path, f"contribute_{name}", summary, None, answer, errors=errors, body=body)


OPERATIONS = (
    _get("status", "What the node is doing, and how far it is.", models.Status),
    _get("rounds", "The record of the rounds: the newest 10,000 are kept at hand.", models.Rounds, models.RoundsQuery),
    Operation(
        "GET",
        f"{PREFIX}/events",
        "events",
        "What happens, as server-sent events from now on: `round` (as in `rounds`), `phase`, `message` (a line of the"
        " log), `started` (a learner is ready; later rounds than the one it names are done again), `state` (after a"
        " change) and, as the last one, `end`: the reader did not keep up, or the node stops. A comment each 15"
        " seconds shows that the stream lives. At most 16 streams.",
        media="text/event-stream",
        errors=(503,),
    ),
    _get("peers", "The swarm as the node sees it, a second ago at most.", models.Peers),
    _get(
        "rollouts",
        "Groups of rollouts in the pool with texts, rewards and origins, newest first. Texts are of strangers, too:"
        " show them as text. They are cut at 4,000 characters.",
        models.Rollouts,
        models.RolloutsQuery,
    ),
    _get("firsts", "First successes on each kind of task, and whether others' came before.", models.Firsts),
    _get("evaluations", "What was measured on held-out tasks during training.", models.Evaluations),
    _get("resources", "Memory, disk and processors, at most two seconds old.", models.Resources),
    _get("log", "The newest 300 lines of the log.", models.Log),
    _get("config", "The configuration in force, secrets masked.", models.Settings),
    Operation("GET", f"{PREFIX}/openapi.json", "openapi", "This description, as OpenAPI 3.1."),
    Operation(
        "GET", "/metrics", "metrics", "Metrics in the text format of Prometheus, version 0.0.4.", media="text/plain"
    ),
    _post("pause", "Finish the round in hand and begin no other. A restart goes on."),
    _post("resume", "Go on after `pause`."),
    _post("checkpoint", "Write a checkpoint when the round in hand is done; `saved_round` of `status` shows it."),
    _post("stop", "End the node as SIGTERM does: the last finished round is saved, the round in hand is dropped."),
    _contribute("task", "A task for a person or a program to answer; what `/contribute` shows.", models.OpenTask),
    _contribute(
        "answer",
        "Score an answer. With a right one, or the last try, the task is over and its answers are shared as a group.",
        models.Judged,
        models.Answer,
    ),
    _contribute(
        "next", "Leave a task; what it was answered is shared if it teaches anything.", models.Gone, models.Left
    ),
)

_ERRORS = {
    400: "A parameter or a field that cannot be used; `param` names it.",
    401: "The token is missing or wrong.",
    403: "The request comes from a page of another site, or lacks the header that a change needs.",
    404: "There is no such task (any more).",
    408: "The body took too long to arrive.",
    409: "The node is a relay: it has no rounds.",
    413: "The body is too long.",
    503: "Too many requests or streams at a time, or this cannot be had just now: come back after `Retry-After`.",
}


def document(version: str) -> dict[str, Any]:
    """The OpenAPI document."""
    used: set[type[BaseModel]] = {
        model for operation in OPERATIONS for model in (operation.answer, operation.body) if model is not None
    }
    ordered: list[type[BaseModel]] = sorted({*used, models.Failure}, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "serialization") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "swarmnode", "version": version, "description": " ".join(_ACCESS.split())},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _described(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media: {}}
    if operation.answer is not None:
        content = {operation.media: {"schema": {"$ref": f"#/components/schemas/{operation.answer.__name__}"}}}
    failure = {"application/json": {"schema": {"$ref": "#/components/schemas/Failure"}}}
    responses: dict[str, Any] = {str(operation.status): {"description": operation.summary, "content": content}}
    for code in sorted({401, 403, *operation.errors}):
        responses[str(code)] = {"description": _ERRORS[code], "content": failure}
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses,
    }
    parameters = [_parameter(*item) for item in _parameters(operation)]
    if operation.method == "POST":
        parameters.append(
            {
                "name": "X-Swarmnode",
                "in": "header",
                "required": False,
                "schema": {"type": "string"},
                "description": "Any value; needed where no token is.",
            }
        )
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described


def _parameters(operation: Operation) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if operation.query is not None:
        yield from operation.query.model_json_schema(by_alias=True)["properties"].items()


def _parameter(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"name": name, "in": "query", "required": False, "schema": rest, "description": schema["description"]}


_ACCESS = """
The node serves HTTP on 127.0.0.1, port 8471 unless `[api]` says otherwise; `swarmnode status` prints the address. On a
loopback address no token is needed unless `[api] token` sets one. On any other address one always is: send
`Authorization: Bearer TOKEN`. A node that had to make its own keeps it in `api.token` in its data directory, readable
by its owner alone. A request that changes something (POST) needs the token, or where none is in force the header
`X-Swarmnode: 1`, which a page of another site cannot send. Requests of other sites' pages, told by Host, Origin and
Sec-Fetch-Site, get status 403. There is no TLS: outside a network that you trust put a proxy with TLS in front, and its
name into `[api] names`.
"""


def markdown() -> str:
    """The reference (`docs/api.md`)."""
    lines = [
        "# HTTP interface",
        "",
        "<!-- Made by `python -m node.api.openapi`; a test keeps it current. -->",
        "",
        *_ACCESS.strip().splitlines(),
        "",
        'Errors are `{"error": {"message", "type", "param", "code"}}`. The OpenAPI document is at'
        f" `{PREFIX}/openapi.json`. The",
        "OpenAI-compatible endpoint below `/v1` (`[api] openai`) is described in the README.",
        "",
        "Anyone with an account on this machine can reach a loopback address: on a shared machine set `[api] token`.",
        "",
        "```sh",
        "curl http://127.0.0.1:8471/api/v1/status",
        "curl -X POST -H 'X-Swarmnode: 1' http://127.0.0.1:8471/api/v1/pause",
        'curl -H "Authorization: Bearer $(cat DATA_DIR/api.token)" http://node.example.org:8471/metrics',
        "```",
        "",
        "| request | what it does | answer |",
        "|---|---|---|",
    ]
    for operation in OPERATIONS:
        answer = f"`{operation.answer.__name__}`" if operation.answer else f"`{operation.media}`"
        body = f" Takes `{operation.body.__name__}`." if operation.body else ""
        lines.append(f"| `{operation.method} {operation.path}` | {operation.summary}{body} | {answer} |")
    lines += ["", "## Parameters", "", "| request | parameter | default | meaning |", "|---|---|---|---|"]
    for operation in OPERATIONS:
        for name, schema in _parameters(operation):
            default = json.dumps(schema.get("default"))
            lines.append(f"| `{operation.name}` | `{name}` | `{default}` | {schema['description']} |")
    lines += ["", "## Bodies and answers"]
    for name, schema in sorted(document("")["components"]["schemas"].items()):
        lines += _object(name, schema)
    return "\n".join(lines) + "\n"


def _object(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"### `{name}`", "", " ".join(schema.get("description", "").split()), "")
    yield from ("| key | type | meaning |", "|---|---|---|")
    for key, field in schema["properties"].items():
        meaning = " ".join(field.get("description", "").split())
        yield f"| `{key}` | {_type(field)} | {meaning} |"


def _type(field: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in field:
        return f"`{field['$ref'].rpartition('/')[2]}`"
    if "anyOf" in field:
        return " or ".join(_type(part) for part in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "anything"))
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if kind == "object" and isinstance(field.get("additionalProperties"), dict):
        return f"object of {_type(field['additionalProperties'])}"
    return kind


if __name__ == "__main__":
    print(markdown(), end="")
