"""Which inference engine samples, by the setting."""

from typing import assert_never

from rl.engines.base import InferenceEngine
from rl.engines.transformers import TransformersEngine
from rl.policy import Policy
from rl.settings import EngineSettings


def open_engine(settings: EngineSettings, policy: Policy) -> InferenceEngine:
    """The engine that `settings.kind` names, over `policy`. `auto` takes the fastest one installed."""
    match settings.kind:
        case "auto" | "transformers":
            return TransformersEngine(policy, settings.max_sequences)
        case other:
            assert_never(other)
