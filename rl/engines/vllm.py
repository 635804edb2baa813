"""vLLM as the engine, in this process: many sequences at once, over weights of its own that follow the policy's.

New weights are handed over before the next sampling, in one of two ways. `merged`: the whole model with the adapter
added in, loaded in place; `adapter`: the adapter alone, under a name never used before. Whatever vLLM raises leaves
this module as EngineError or OutOfMemory; after that the engine is to be closed.
"""

import contextlib
import gc
import logging
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from rl import machine
from rl.engines import guard
from rl.engines.adapters import HandOver, check_adapter
from rl.engines.base import Emit, Sampled
from rl.engines.choice import BUILDS, versions
from rl.engines.packing import Extension
from rl.engines.sizing import Machine, Shape, Wishes, arguments
from rl.errors import EngineError, LearnerError, OutOfMemory
from rl.policy import Policy
from rl.rollouts import Sampling
from rl.settings import LearnerSettings
from rl.weights import write_tensors
from rl.work import Progress, Stop, check_stop, first_line, is_out_of_memory
from verifiers.imports import importing

log = logging.getLogger(__name__)

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Arguments that make vLLM start processes of its own."""

MAX_BIASED = 1024
"""Ids beyond the tokenizer that vLLM can be told never to sample."""

MESSAGE = 500
"""Characters of a foreign error that are passed on."""

GREEDY = 1e-5
"""Below this temperature vLLM takes the likeliest token."""

Served = Literal["policy", "base"]


class VllmEngine:
    """An `InferenceEngine` with weights of its own."""

    name = "vllm"

    def __init__(self, policy: Policy, settings: LearnerSettings) -> None:
        """Start vLLM. Raises EngineError, OutOfMemory."""
        self._policy = policy
        self._device = policy.resolved.device
        self._by_adapter = settings.lora.rank > 0 and (
            settings.engine.weights == "adapter" or (settings.engine.weights == "auto" and self._device == "cuda")
        )
        spare = spare_cores(settings) if self._device == "cpu" else 0
        self.apart = settings.training.overlap and (self._device != "cpu" or spare > 0)
        if settings.training.overlap and not self.apart:
            log.info("no core is left to sample beside an update: lower node.threads to leave the engine some")
        # In this process it would wait for the trainer's lock, and its threads for the trainer's cores.
        self._own_processes = self.apart or any(int(settings.engine.args.get(name, 1)) > 1 for name in PARALLEL)
        self._served: Served | None = None
        self._requests = 0
        self._lora: Any = None
        self.seconds_sync = 0.0
        vocabulary = int(policy.model.config.vocab_size)
        beyond = range(len(policy.tokenizer), vocabulary)
        # Output layers are often padded to a round size; what lies beyond the tokenizer has no text.
        self._bias = dict.fromkeys(beyond, -math.inf) if len(beyond) <= MAX_BIASED else {}
        if len(beyond) > MAX_BIASED:
            log.warning("the model's last %d token ids have no text, and vLLM may sample them", len(beyond))
        prepare_environment(own_processes=self._own_processes, threads=spare if self.apart else 0)
        free, shape = measure(self._device), shape_of(policy)
        self.arguments = arguments(shape, free, self._wishes(settings), settings.engine.args)
        if self._device == "cpu":
            self.arguments.setdefault("worker_extension_cls", f"{Extension.__module__}.{Extension.__qualname__}")
        in_files = 4 * policy.weights.count if self._by_adapter else shape.weights if self._own_processes else 0
        self._hand_over = HandOver(need=in_files)
        try:
            with _vllm_errors("did not start"), _untouched():
                self._llm = _open(str(policy.resolved.location), self.arguments)
        except BaseException:
            self._hand_over.close()
            _free()
            raise
        self._unwatch = guard.watch(tidy=self._hand_over.close) if self._own_processes else None
        self.context = int(self._llm.llm_engine.model_config.max_model_len)
        if self.context < policy.context:
            log.warning(
                "engine: memory is short, so prompt and completion together have %d tokens instead of %d; raise "
                "engine.memory_gb, or free some",
                self.context,
                policy.context,
            )

    def _wishes(self, settings: LearnerSettings) -> Wishes:
        return Wishes(
            max_sequences=settings.engine.max_sequences,
            memory_gb=settings.engine.memory_gb,
            new_tokens=settings.sampling.max_new_tokens,
            token_budget=self._policy.token_budget,
            rank=settings.lora.rank,
            adapter=self._by_adapter,
            dtype=str(self._policy.resolved.dtype).removeprefix("torch."),
        )

    def refresh(self) -> None:
        """The policy's weights have changed: hand them over before the next sampling."""
        self._served = None

    def hand_over(self) -> None:
        """See `InferenceEngine.hand_over`."""
        self._serve(base=False)

    def about(self) -> dict[str, Any]:
        """What runs, in plain values: arguments, versions, blocks of the cache."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return {
            "arguments": {
                key: value if isinstance(value, int | float) else str(value) for key, value in self.arguments.items()
            },
            "weights": "adapter" if self._by_adapter else "merged",
            "own_processes": self._own_processes,
            "kv_blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size,
            "vllm": next(iter(versions(BUILDS).values())),
            "torch": torch.__version__,
        }

    # Weights

    def _serve(self, base: bool) -> None:
        """Make vLLM serve the policy's current weights, or the base model's."""
        wanted: Served = "base" if base else "policy"
        if self._by_adapter and base:
            return
        if self._served == wanted:
            return
        began = time.monotonic()
        self._served = None
        with _vllm_errors("did not take the new weights"):
            if self._by_adapter:
                self._new_adapter()
            else:
                self._reload(base=base)
        self._served = wanted
        self.seconds_sync += time.monotonic() - began

    def _new_adapter(self) -> None:
        from vllm.lora.request import LoRARequest

        old = self._lora
        number, directory = self._hand_over.fresh()
        self._policy.weights.save(directory)
        check_adapter(directory)
        self._lora = LoRARequest(f"step-{number}", number, str(directory))
        if old is not None:
            self._llm.llm_engine.remove_lora(old.lora_int_id)
        self._llm.llm_engine.add_lora(self._lora)

    def _reload(self, *, base: bool) -> None:
        state = self._policy.weights.whole(base=base)
        if self._own_processes:
            _, directory = self._hand_over.fresh()
            write_tensors({name: value.contiguous() for name, value in state}, directory / "model.safetensors")
            self._policy.model.config.save_pretrained(directory)
            how: dict[str, Any] = {"weights_path": str(directory)}
        else:
            how = {"weights_iterator": state}
        self._llm.collective_rpc("reload_weights", kwargs=how)
        if self._device == "cpu":
            self._llm.collective_rpc("pack_head")
        self._hand_over.clear()
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM kept what it had computed with the old weights")

    # Sampling

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seed: int,
        *,
        base: bool = False,
        stop: Stop,
        progress: Progress,
        emit: Emit | None = None,
    ) -> list[list[Sampled]]:
        """See `InferenceEngine.generate`."""
        check_stop(stop)
        self._serve(base)
        lora = None if base else self._lora
        # All greedy completions of a prompt are one, and vLLM refuses to compute it more than once.
        copies = sampling.samples if sampling.temperature < GREEDY else 1
        total = sampling.samples * len(prompts)
        results: list[list[Sampled]] = [[] for _ in prompts]
        engine = self._llm.llm_engine
        with _vllm_errors("failed while sampling"), _untouched(seed), torch.inference_mode():
            # What is cached decides which sequences are computed together, and so the last bits of their numbers.
            self._llm.reset_prefix_cache()
            said = 0
            numbers: dict[str, int] = {}
            for number, prompt in enumerate(prompts):
                self._requests += 1
                identifier = str(self._requests)
                numbers[identifier] = number
                # vLLM counts on from it, one for each completion.
                own_seed = seed + number * sampling.samples if self._own_processes else None
                parameters = self._parameters(sampling, own_seed, emit)
                engine.add_request(identifier, {"prompt_token_ids": list(prompt)}, parameters, lora_request=lora)
            try:
                while engine.has_unfinished_requests():
                    check_stop(stop)
                    for output in engine.step():
                        if emit is not None:
                            # A step may give more than one token.
                            for token in output.outputs[0].token_ids[said:]:
                                emit(int(token))
                            said = len(output.outputs[0].token_ids)
                        if output.finished:
                            results[numbers.pop(output.request_id)] = _sampled(output) * copies
                    progress(total - copies * engine.get_num_unfinished_requests(), total, "completions")
            finally:
                if numbers:
                    engine.abort_request(list(numbers))
        progress(total, total, "completions")
        return results

    def _parameters(self, sampling: Sampling, seed: int | None, emit: Emit | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=1 if sampling.temperature < GREEDY else sampling.samples,
            temperature=0.0 if sampling.temperature < GREEDY else sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            seed=None if seed is None else seed % 2**63,
            stop_token_ids=sorted(self._policy.stop_tokens),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            logit_bias=self._bias or None,
            output_kind=RequestOutputKind.FINAL_ONLY if emit is None else RequestOutputKind.CUMULATIVE,
        )

    def close(self) -> None:
        """Give back memory and processes. Whatever state vLLM is in, this does not raise."""
        llm, self._llm = self._llm, None
        self._lora = None
        if self._unwatch is not None:
            self._unwatch()
        self._hand_over.close()
        if llm is None:
            return
        try:
            llm.llm_engine.engine_core.shutdown()
        except Exception as error:  # noqa: BLE001 - it may be broken in any way, which is why it is closed
            log.warning("vLLM did not shut down cleanly: %s", first_line(error))
        del llm
        _free()


def _open(location: str, given: Mapping[str, Any]) -> Any:
    import dataclasses

    with importing():
        from vllm import LLM, EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(given.keys() - known):
        raise EngineError(f"engine.args: vLLM knows no {', '.join(unknown)}")
    set_threads = torch.set_num_threads
    try:
        return LLM(model=location, **given)
    finally:
        # On a CPU vLLM replaces it by a function that does nothing.
        torch.set_num_threads = set_threads


def _sampled(output: Any) -> list[Sampled]:
    """The completions of a finished request. Raises EngineError if a log-prob is no number."""
    completions: list[Sampled] = []
    for one in sorted(output.outputs, key=lambda one: int(one.index)):
        tokens = tuple(int(token) for token in one.token_ids)
        logprobs = tuple(one.logprobs.logprobs[start] for start in one.logprobs.start_indices)
        if not all(map(math.isfinite, logprobs)):
            raise EngineError(
                "the model's logits are not finite, so nothing can be sampled: its weights are damaged or its numbers "
                "overflow; go back to an older checkpoint, or set model.dtype to float32"
            )
        completions.append(Sampled(tokens, logprobs, one.finish_reason == "stop"))
    return completions


def spare_cores(settings: LearnerSettings) -> int:
    """How many cores the settings leave to an engine while the policy is trained. All are the trainer's by default."""
    return max(0, machine.cpus() - settings.threads) if settings.threads else 0


def prepare_environment(*, own_processes: bool, threads: int = 0) -> None:
    """Tell vLLM, which reads the environment when it is imported, to stay quiet and offline, in this process unless it
    is to have `own_processes`. These compute with `threads` each, unless that is 0.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if own_processes else "0"
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # Threads bound to cores would take the trainer, and other nodes, with them.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    # What it says while it is imported, before it has read that.
    logging.getLogger("vllm").setLevel(logging.ERROR)


def measure(device: str) -> Machine:
    """The memory that is free for the engine now."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        major, minor = torch.cuda.get_device_capability()
        return Machine("cuda", free, total, major + minor / 10)
    memory = machine.memory()
    return Machine("cpu", memory.available, memory.total)


def shape_of(policy: Policy) -> Shape:
    """What of the policy's model decides how much memory it takes."""
    config = policy.model.config
    heads = int(config.num_attention_heads)
    width = policy.resolved.dtype.itemsize
    return Shape(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocabulary=int(config.vocab_size),
        context=policy.context,
        weights=sum(p.numel() for n, p in policy.model.named_parameters() if ".lora_" not in n) * width,
        width=width,
    )


@contextlib.contextmanager
def _vllm_errors(what: str) -> Iterator[None]:
    """Raise whatever comes out of vLLM as EngineError, or OutOfMemory. Our own errors pass."""
    try:
        yield
    except LearnerError:
        raise
    except Exception as error:
        # vLLM raises what its many libraries raise; none of it is swallowed.
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"vLLM {what}: memory ran out ({first_line(error)}); lower engine.memory_gb or engine.max_sequences"
            ) from error
        # The first line of a validation error names neither argument nor value.
        said = " ".join(str(error).split())[:MESSAGE]
        raise EngineError(f"vLLM {what}: {type(error).__name__}: {said}") from error


@contextlib.contextmanager
def _untouched(seed: int | None = None) -> Iterator[None]:
    """Seed the generators that vLLM draws from in this process, and put them back as they were."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed % 2**63)
            np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
