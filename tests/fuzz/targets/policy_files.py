"""The files of a policy: what it was, its weights, its optimiser."""

import io
import json
from types import SimpleNamespace
from typing import cast

import torch
from safetensors.torch import save

from rl.checkpoint import POLICY as STATE_FILE
from rl.errors import CheckpointError
from rl.optimizer import make_adamw
from rl.policy import Policy
from rl.saved import FORMAT, OPTIMIZER_FILE, read_policy
from rl.settings import LoraSettings
from rl.weights import ADAPTER_FILE, Weights
from tests.fuzz.scratch import cut, directory, joined

PATH = directory()
LORA = LoraSettings()
MASTER = torch.zeros(2, 3)
WEIGHTS = SimpleNamespace(_peft=True, names=["a.weight"], masters=[MASTER])
POLICY = SimpleNamespace(
    resolved=SimpleNamespace(identity="tiny"),
    weights=SimpleNamespace(read=lambda directory: Weights.read(cast(Weights, WEIGHTS), directory)),
    trains=True,
    optimizer=make_adamw([MASTER], (0.9, 0.999)),
)


def seeds() -> list[bytes]:
    optimizer = io.BytesIO()
    torch.save(POLICY.optimizer.state_dict(), optimizer)
    state = {"format": FORMAT, "model": "tiny", "step": 3, "lora": LORA.model_dump(), "gate": [1.0, -2.5]}
    files = [json.dumps(state).encode(), save({"a.weight": MASTER}, {"format": "pt"}), optimizer.getvalue()]
    return [joined(files), joined(files[:2])]


def run(data: bytes) -> None:
    pieces = cut(data)
    for name in (STATE_FILE, ADAPTER_FILE, OPTIMIZER_FILE):
        (PATH / name).write_bytes(next(pieces, b""))
    try:
        saved = read_policy(cast(Policy, POLICY), LORA, PATH)
    except CheckpointError:
        return
    assert [weight.shape for weight in saved.weights] == [MASTER.shape]
    assert all(abs(number) < float("inf") for number in saved.known)
    assert saved.step >= 0
