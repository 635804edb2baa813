"""Bodies of chat completion requests."""

import json

from node.api.asked import MAX_SAMPLES, MAX_STOPS, parse
from node.api.errors import ApiError


def seeds() -> list[bytes]:
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    full = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be brief"}], "name": "x"},
            {"role": "developer", "content": "é"},
            {"role": "assistant", "content": "", "refusal": None},
        ],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "n": 2,
        "seed": -3,
        "stop": ["a", "b"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
    }
    return [json.dumps(hello).encode(), json.dumps(full).encode(), json.dumps(hello | {"stop": "x", "n": 1}).encode()]


def run(data: bytes) -> None:
    try:
        asked = parse(data)
    except ApiError as error:
        assert 400 <= error.status < 500
        assert error.response().body
        return
    sampling = asked.sampling(100)
    assert 1 <= sampling.max_new_tokens <= 100
    assert 0 <= sampling.temperature <= 2
    assert 0 < sampling.top_p <= 1
    assert len(asked.seeds()) == asked.n <= MAX_SAMPLES
    assert len(asked.stop) <= MAX_STOPS
    # What goes to the learner travels as UTF-8.
    assert json.dumps(asked.turns(), ensure_ascii=False).encode()
