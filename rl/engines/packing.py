"""What vLLM's workers are asked for beyond what vLLM itself offers. Imports neither torch nor vLLM."""

from typing import Any


class Extension:
    """Mixed into vLLM's workers by its argument `worker_extension_cls`."""

    def pack_head(self) -> None:
        """Have an output layer that is tied to the embedding follow it.

        On a CPU it computes with a packed copy of its weights, which vLLM makes when it loads a model, and not when it
        reloads one that has no weights of the layer's own.
        """
        worker: Any = self
        head = getattr(worker.get_model(), "lm_head", None)
        method = getattr(head, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(head)
