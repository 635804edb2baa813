"""The official OpenAI client against a node that trains."""

import re
import signal
import threading
import time
from contextlib import suppress

import httpx
import pytest
from openai import BadRequestError, OpenAI

from tests.e2e.nodes import QUICK, RunningNode, StartNode, wait_for

pytestmark = pytest.mark.slow

SERVED = (
    *("--set", "api.openai=true", "--set", "api.port=0", "--set", "api.max_tokens=200"),
    *("--set", "engine.kind=transformers", *QUICK),
)
ADDRESS = re.compile(r"OpenAI-compatible endpoint at (http://\S+/v1)")


def address(node: RunningNode) -> str:
    """Where the node serves, once it has a policy to serve."""
    node.wait_until(lambda: ADDRESS.search(node.log()) is not None)
    found = ADDRESS.search(node.log())
    assert found is not None
    return found[1]


def test_the_official_client_chats_with_a_node_that_goes_on_training(start_node: StartNode) -> None:
    node = start_node(*SERVED)
    url = address(node)
    # A second node at the same port says what to change.
    port = url.rsplit(":", 1)[1].removesuffix("/v1")
    second = start_node(*SERVED, "--set", f"api.port={port}", data_dir=node.data_dir.parent / "second")
    # Before there is a policy it says when to come back; the client does, by itself.
    with OpenAI(base_url=url, api_key="any", max_retries=20, timeout=60) as client:
        [model] = client.models.list().data
        assert model.id == "tiny"
        ask = client.chat.completions.create
        answer = ask(model="tiny", messages=[{"role": "user", "content": "1 + 1?"}], max_tokens=5, n=2, seed=1)
        assert [choice.finish_reason in ("stop", "length") for choice in answer.choices] == [True] * 2
        assert answer.usage is not None
        assert 0 < answer.usage.completion_tokens <= 10
        assert answer.usage.prompt_tokens > 0
        stream = ask(
            model="tiny",
            messages=[{"role": "user", "content": "1 + 1?"}],
            max_completion_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = stream
        assert last.usage is not None
        assert last.usage.completion_tokens <= 40
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] != []
        with pytest.raises(BadRequestError) as refused:
            ask(model="tiny", messages=[{"role": "user", "content": "1 + 1?" * 10_000}])
        assert refused.value.code == "context_length_exceeded"

        def answering_step() -> str | None:
            short = ask(model="tiny", messages=[{"role": "user", "content": "?"}], max_tokens=3)
            return short.system_fingerprint

        # Every answer is of the policy as it then was, and the rounds go on between them; not each of them moves it.
        first = answering_step()
        wait_for(lambda: answering_step() != first, 60, "for an answer of a later policy")
        # A client that leaves in the middle stops nothing.
        leave_in_the_middle(url)
        now = node.rounds()[-1]
        node.wait_for_round(now + 3)
        assert ask(model="tiny", messages=[{"role": "user", "content": "?"}], max_tokens=3).choices
        assert second.wait(60) == 1
        assert f"port {port}" in second.log()
        assert "[api] port" in second.log()
        # Nor does an answer in hand keep the node from stopping.
        threading.Thread(target=leave_in_the_middle, args=(url, 20.0), daemon=True).start()
        time.sleep(0.2)
        node.process.send_signal(signal.SIGINT)
        assert node.wait(30) == 0
    assert "is saved" in node.log()
    assert node.rounds() == list(range(1, len(node.rounds()) + 1)), "every round once"
    assert "Traceback" not in node.log() + second.log()
    assert "learner died" not in node.log()


def leave_in_the_middle(url: str, seconds: float = 0.3) -> None:
    """Ask for a long stream and hang up."""
    request = {"messages": [{"role": "user", "content": "tell me all"}], "max_tokens": 200, "stream": True}
    with (
        suppress(httpx.HTTPError),
        httpx.Client(trust_env=False, timeout=seconds) as client,
        client.stream("POST", f"{url}/chat/completions", json=request) as response,
    ):
        end = time.monotonic() + seconds
        for _ in response.iter_raw():
            if time.monotonic() > end:
                return
