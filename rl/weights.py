"""The weights that train: an adapter (or the whole model), their float32 masters, and other ways to run the model.

A bfloat16 weight is too coarse to add small steps to, so each trained weight has a float32 master that the optimiser
works on; gradients of all micro-batches add up in float32 too. A float32 model is its own master.
"""

import errno
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl.errors import CheckpointError, ModelError
from rl.merged import MergedAdapters, mergeable
from rl.settings import LoraSettings

log = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_model.safetensors"
MODEL_FILE = "model.safetensors"


class Weights:
    """A causal language model of transformers, what of it trains, and in what form it is run.

    `model` is the plain transformers model; with an adapter its linear layers are peft's. `names` and `masters` are
    parallel: the name a trained weight has in a file, and its float32 value.
    """

    def __init__(
        self, model: Any, lora: LoraSettings, name: str, seed: int, load_base: Callable[[], Any], keep_base: bool
    ) -> None:
        """`name` is what saved files call the model. `load_base` gives a fresh copy of it; `keep_base` keeps one at
        hand (only matters without adapter).
        """
        self.model = model
        self._name = name
        self._load_base = load_base
        self._peft: Any = None
        self._base: list[Tensor] = []
        if lora.rank > 0:
            self._attach(lora, seed)
        named = self._trained()
        self.names = list(named)
        self._working = list(named.values())
        self.masters = [p if p.dtype == torch.float32 else p.detach().float().requires_grad_() for p in self._working]
        if lora.rank == 0 and keep_base:
            self._base = [p.detach().clone() for p in self._working]
        layers = mergeable(model)
        of = {id(working): master for working, master in zip(self._working, self.masters, strict=True)}
        self._merged = MergedAdapters(layers, of) if layers else None

    @property
    def count(self) -> int:
        """Trained weights."""
        return sum(p.numel() for p in self._working)

    def _attach(self, lora: LoraSettings, seed: int) -> None:
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            # To peft a text is a pattern of whole paths; here it is a module's name, unless it is the word for all.
            target_modules=lora.targets
            if lora.targets == "all-linear" or isinstance(lora.targets, list)
            else [lora.targets],
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                self._peft = get_peft_model(self.model, config, autocast_adapter_dtype=False)
            except ValueError as error:
                raise ModelError(f"lora.targets does not fit this model: {error}") from error
        config.base_model_name_or_path = self._name

    def _trained(self) -> dict[str, Any]:
        if self._peft is None:
            for parameter in self.model.parameters():
                parameter.requires_grad_(True)
            return dict(self.model.named_parameters())
        trained = {p.data_ptr(): p for p in self.model.parameters() if p.requires_grad}
        files = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        return {name: trained[value.data_ptr()] for name, value in files.items()}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for working, master in zip(self._working, self.masters, strict=True):
            working.grad = None
            master.grad = None

    def collect_grad(self) -> None:
        """Add what the last backward pass left on the model to the masters' gradients."""
        for working, master in zip(self._working, self.masters, strict=True):
            if working is master or working.grad is None:
                continue
            gradient = working.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            working.grad = None

    def complete_grad(self) -> list[bool]:
        """Give every master a gradient of its own, dense, zero where it had none. Returns which ones had one."""
        reached = [master.grad is not None for master in self.masters]
        for master in self.masters:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad.contiguous()
        return reached

    @torch.no_grad()
    def digest(self) -> int:
        """A number that almost surely tells masters apart that differ in any bit, whatever computes it."""
        sums = torch.stack([master.view(torch.int32).sum(dtype=torch.int64) for master in self.masters])
        return hash(tuple(sums.tolist()))

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the model up to its masters."""
        for working, master in zip(self._working, self.masters, strict=True):
            if working is not master:
                working.copy_(master)
        if self._merged is not None:
            self._merged.refresh()

    def snapshot(self) -> list[Tensor]:
        """A copy of all trained weights."""
        return [master.detach().clone() for master in self.masters]

    @torch.no_grad()
    def restore(self, values: list[Tensor]) -> None:
        """Set all trained weights to what `snapshot` gave."""
        for master, value in zip(self.masters, values, strict=True):
            master.copy_(value)
        self.publish()

    @contextmanager
    def base(self) -> Iterator[None]:
        """Run the model as it was before any training."""
        if self._peft is not None:
            with self._peft.disable_adapter():
                yield
            return
        base = self._base or [p.detach() for p in self._load_base().parameters()]
        trained = [p.data for p in self._working]
        for working, value in zip(self._working, base, strict=True):
            working.data = value
        try:
            yield
        finally:
            for working, value in zip(self._working, trained, strict=True):
                working.data = value

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The model with its adapter added into the linear layers.

        The layers' own weights are put aside and put back, not computed back, so they return bit by bit.
        """
        if self._peft is None:
            yield
            return
        layers = [m for m in self.model.modules() if isinstance(m, LoraLinear)]
        own = [layer.base_layer.weight.data for layer in layers]
        try:
            with torch.no_grad(), self._peft.disable_adapter():
                for layer in layers:
                    layer.base_layer.weight.data = self._whole_weight(layer)
                yield
        finally:
            for layer, weight in zip(layers, own, strict=True):
                layer.base_layer.weight.data = weight

    def whole(self, *, base: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The whole model's weights one by one under its own names, without what is tied to another: with the adapter
        added in, or as they were before any training.
        """
        if self._peft is None:
            with self.base() if base else nullcontext():
                yield from ((name, p.detach()) for name, p in self.model.named_parameters())
            return
        layers = {f"{name}.base_layer.weight": m for name, m in self.model.named_modules() if isinstance(m, LoraLinear)}
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                continue
            value = parameter.detach()
            if not base and (layer := layers.get(name)) is not None:
                value = self._whole_weight(layer)
            yield name.replace(".base_layer.", "."), value

    @torch.no_grad()
    def _whole_weight(self, layer: LoraLinear) -> Tensor:
        """The weight of an adapted layer with the adapter added in: the one that it runs on, if it runs merged."""
        running = None if self._merged is None else self._merged.weight(layer)
        if running is not None:
            return running
        weight: Tensor = layer.base_layer.weight
        whole: Tensor = weight.float() + layer.get_delta_weight("default")
        return whole.to(weight.dtype)

    def save(self, directory: Path) -> None:
        """Write the trained weights, in float32: an adapter as peft reads it, or a model as transformers reads it."""
        tensors = {n: m.detach().cpu().contiguous() for n, m in zip(self.names, self.masters, strict=True)}
        if self._peft is None:
            write_tensors(tensors, directory / MODEL_FILE)
            self.model.config.save_pretrained(directory)
        else:
            write_tensors(tensors, directory / ADAPTER_FILE)
            self._peft.peft_config["default"].save_pretrained(str(directory))

    def read(self, directory: Path) -> list[Tensor]:
        """What `save` wrote there, for `restore`. Raises CheckpointError if it does not fit this model."""
        path = directory / (MODEL_FILE if self._peft is None else ADAPTER_FILE)
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        shapes = {name: master.shape for name, master in zip(self.names, self.masters, strict=True)}
        if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise CheckpointError(f"the weights in {path} have other names or shapes than this model's")
        values = [tensors[name] for name in self.names]
        if not math.isfinite(torch.nn.utils.get_total_norm(values, math.inf)):
            raise CheckpointError(
                f"the weights in {path} are not all finite: training went wrong before it was saved; remove this "
                "checkpoint to go back to the one before, and lower training.lr"
            )
        return values

    @torch.no_grad()
    def merged_state(self) -> dict[str, Tensor]:
        """The whole model's weights under its own names with the adapter added in, as plain transformers reads them."""
        if self._peft is None:
            return {name: p.detach().cpu() for name, p in self.model.named_parameters()}
        with self.merged():
            names = {n: p for n, p in self.model.named_parameters() if ".lora_" not in n}
            return {name.replace(".base_layer.", "."): p.detach().cpu() for name, p in names.items()}


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError, as the rest of the standard library does when a disk is full."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        told = re.search(r"os error (\d+)", str(error))
        raise OSError(int(told[1]) if told else errno.EIO, str(error), str(path)) from error
