"""What settings are refused before they can do harm."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from rl.settings import LearnerSettings


@pytest.mark.parametrize(
    ("section", "key", "largest"),
    [
        ("lora", "alpha", 1e4),
        ("sampling", "temperature", 100.0),
        ("sampling", "top_p", 1.0),
        ("sampling", "max_new_tokens", 131072),
        ("engine", "max_sequences", 4096),
        ("training", "lr", 1.0),
        ("training", "weight_decay", 1.0),
        ("training", "max_grad_norm", 1e6),
        ("training", "clip_high", 100.0),
        ("training", "kl", 100.0),
        ("training", "epochs", 64),
        ("training", "minibatches", 64),
        ("training", "warmup_steps", 10**9),
        ("training", "token_budget", 2**24),
    ],
)
def test_no_number_is_without_bound(section: str, key: str, largest: float) -> None:
    LearnerSettings.model_validate({section: {key: largest}})
    for value in (2 * largest, math.inf, math.nan, -1):
        with pytest.raises(ValidationError):
            LearnerSettings.model_validate({section: {key: value}})


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": 1025},
        {"sampling": {"temperature": 1e-4}},
        {"sampling": {"top_p": 1e-4}},
        {"training": {"betas": (0.9999999, 0.999)}},
        {"training": {"betas": (math.nan, 0.999)}},
    ],
)
def test_other_bounds(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LearnerSettings.model_validate(settings)
