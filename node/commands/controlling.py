"""`swarmnode watch`, `pause`, `resume`, `checkpoint` and `stop`: the running node, asked over its HTTP server."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from node.api.client import NoAnswer, NodeClient
from node.datadir import DataDir
from node.record import Record, tokens_per_second
from node.text import clean

_LOOK_SECONDS = 0.3


def pause(path: Path, wait: bool) -> None:
    """Let the node finish its round and begin no other, and wait until it has. Raises NoAnswer, DataDirError."""
    client = NodeClient.at(path)
    answer = client.post("pause")
    if answer["state"] == "pausing":
        print("the round in hand is finished first", flush=True)
    while wait and answer["state"] == "pausing":
        time.sleep(_LOOK_SECONDS)
        answer = client.get("status")
    print(f"{answer['state']} after round {answer['round']}; `swarmnode resume` goes on")


def resume(path: Path) -> None:
    """Let the node go on. Raises NoAnswer, DataDirError."""
    answer = NodeClient.at(path).post("resume")
    print(f"{answer['state']}, {answer['round']} rounds are done")


def checkpoint(path: Path) -> None:
    """Have the node write a checkpoint, and wait until it has. Raises NoAnswer, DataDirError."""
    client = NodeClient.at(path)
    asked = client.post("checkpoint")
    if not asked["round"]:
        print("no round is finished yet: there is nothing to save")
        return
    saved = asked["saved_round"]
    while saved < asked["round"]:
        time.sleep(_LOOK_SECONDS)
        saved = client.get("status")["saved_round"]
    print(f"round {saved} is saved")


def stop(path: Path, wait: bool) -> None:
    """Have the node save and end, and wait until it has. Raises NoAnswer if none runs there, DataDirError.

    A node without an HTTP server gets SIGTERM.
    """
    data = DataDir.look(path)
    pid = data.running()
    if not pid:
        raise NoAnswer(f"no node runs in {data.path}")
    try:
        NodeClient(data).post("stop")
    except NoAnswer:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass
        except PermissionError as error:
            raise NoAnswer(f"process {pid} is another user's: that user can stop it") from error
    while wait and data.running() == pid:
        time.sleep(_LOOK_SECONDS)
    print("stopped" if wait else "stopping")


def print_served(path: Path) -> None:
    """What `swarmnode status` adds to what it read from files, if the running node can be asked.

    Raises DataDirError.
    """
    try:
        client = NodeClient.at(path)
        status = client.get("status")
    except NoAnswer:
        return
    print(f"{'now':<12} {clean(status['state'])}: {clean(status['phase'])} for {status['phase_seconds']:.0f} s")
    asks = " (asks for the token)" if client.contact.token else ""
    print(f"{'dashboard':<12} {client.contact.address}{asks}")


def watch(path: Path, as_json: bool) -> None:
    """Print what happens in the node, until it ends or Ctrl-C. Raises NoAnswer, DataDirError."""
    for kind, data in NodeClient.at(path).events():
        if as_json:
            print(json.dumps({"event": kind, "data": json.loads(data)}, ensure_ascii=False), flush=True)
            continue
        line = _line(kind, json.loads(data))
        if line:
            print(line, flush=True)


def _line(kind: str, data: dict[str, Any]) -> str:
    """What a person reads of an event; nothing of those that come many times a round."""
    match kind:
        case "round":
            return _round(Record.model_validate(data), data.get("kinds", {}))
        case "message":
            return f"[{clean(data['level'])}] {clean(data['text'])}"
        case "state":
            return f"[{clean(data['state'])}]"
        case "end":
            return "the node ended the stream: it stops, or this terminal did not keep up"
    return ""


def _round(record: Record, kinds: dict[str, float]) -> str:
    external = "" if record.reward_external is None else f"  others {record.reward_external:.3f}"
    solved = ", ".join(f"{clean(kind)} {reward:.2f}" for kind, reward in kinds.items() if reward > 0)
    seconds = record.seconds_generate + record.seconds_score + record.seconds_share + record.seconds_update
    return (
        f"round {record.round:<6} reward {record.reward_local:.3f}{external}  {seconds:.1f} s"
        f"  {tokens_per_second([record]):.0f} tokens/s  {solved}"
    ).rstrip()
