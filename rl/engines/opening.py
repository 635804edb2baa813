"""Opening the engine that was chosen."""

from rl.engines.base import InferenceEngine
from rl.engines.choice import choose
from rl.engines.transformers import TransformersEngine
from rl.policy import Policy
from rl.settings import LearnerSettings

TRANSFORMERS_SEQUENCES = 64


def open_engine(settings: LearnerSettings, policy: Policy) -> tuple[InferenceEngine, str]:
    """The engine over `policy`, and why it is this one. Raises EngineError or OutOfMemory."""
    choice = choose(settings.engine, policy.resolved.location, policy.resolved.device)
    if choice.kind == "vllm":
        # vLLM may not be installed, and reads the environment when it is imported.
        from rl.engines.vllm import VllmEngine

        return VllmEngine(policy, settings), choice.why
    return TransformersEngine(policy, settings.engine.max_sequences or TRANSFORMERS_SEQUENCES), choice.why
