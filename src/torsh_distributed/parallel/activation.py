"""Activation checkpointing: backward recomputes what forward does not keep for it.

Applied to a model before it is spread over ranks. Names of modules and parameters do not change, only the `forward` of
the chosen layers. Random state is restored, so dropout drops the same elements both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.compiling import compile_model
from torsh_distributed.parallel.models.wrapping import Named, repeated_layers
from torsh_distributed.parallel.torch_internals import _get_current_function_mode_stack
from torsh_distributed.plan.problems import did_you_mean
from torsh_distributed.plan.sections.training import ActivationConfig, CompileConfig

Forward = Callable[..., Any]

_COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""Results kept under `selective`: matrix products and attention, which cost more to recompute than to keep."""


def is_costly(op: object) -> bool:
    """Whether `selective` keeps the result of an operation."""
    return op in _COSTLY


@dataclass(frozen=True)
class RecomputedLayers:
    """The layers of a model by what is recomputed of them."""

    whole: Named = field(default_factory=dict)
    selective: Named = field(default_factory=dict)
    """All but costly operations."""

    @property
    def all(self) -> Named:
        """Those of which anything is recomputed."""
        return {**self.whole, **self.selective}


def checkpoint_activations(
    model: nn.Module,
    config: ActivationConfig,
    *,
    layers: Named | None = None,
    group: dist.ProcessGroup | None = None,
) -> Named:
    """Change the model in place as the config says; returns the layers that are (or may be) recomputed.

    `layers` are the candidates; by default those that repeat: modules of one class, two or more in one list. Under
    `by_size` each is measured at its first call, by a forward whose result is discarded, so not even the first step
    keeps more than allowed. Ranks of `group` use the largest size among them, because all must choose the same layers.
    Under `budget` the config names them.
    """
    chosen = _chosen_layers(model, config, layers)
    _recompute(chosen, config, group)
    if config.offload_to_cpu:
        _replace_forward(model, _Offloading(model))
    return chosen.all


def compile_and_checkpoint(
    model: nn.Module,
    compiling: CompileConfig,
    config: ActivationConfig,
    *,
    layers: Named | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compile and checkpoint the layers of a model in the order that torch allows, in place.

    Backward calls a compiled layer again to recompute it. What `selective` keeps is chosen by operation, and operations
    are seen only while a graph is made: there the graph contains the recomputation.
    """
    chosen = _chosen_layers(model, config, layers)
    _recompute(RecomputedLayers(selective=chosen.selective), config, group)
    compile_model(model, compiling, layers=layers)
    _recompute(RecomputedLayers(whole=chosen.whole), config, group)
    if config.offload_to_cpu:
        _replace_forward(model, _Offloading(model))


def _chosen_layers(model: nn.Module, config: ActivationConfig, layers: Named | None) -> RecomputedLayers:
    if config.strategy == "none":
        return RecomputedLayers()
    candidates = repeated_layers(model) if layers is None else layers
    if not candidates:
        raise ConfigurationError(
            f"activation.strategy {config.strategy!r}: the model has no layers that repeat",
            hint="put the layers into an nn.ModuleList or nn.Sequential, or set activation.strategy = none",
            model=type(model).__name__,
        )
    if config.strategy == "budget":
        whole = {name: _named(candidates, name) for name in config.whole_layers}
        return RecomputedLayers(whole, {name: _named(candidates, name) for name in config.selective_layers})
    if config.strategy == "selective":
        return RecomputedLayers(selective=candidates)
    step = config.every_n_layers if config.strategy == "uniform" else 1
    return RecomputedLayers(whole=dict(list(candidates.items())[::step]))


def _named(candidates: Named, name: str) -> nn.Module:
    if name not in candidates:
        raise ConfigurationError(
            f"activation.whole_layers and activation.selective_layers: {name} is not one of the layers that repeat",
            hint=did_you_mean(name, candidates) or f"they are {', '.join(list(candidates)[:5])}, …",
            key="activation.whole_layers",
        )
    return candidates[name]


def _recompute(chosen: RecomputedLayers, config: ActivationConfig, group: dist.ProcessGroup | None) -> None:
    for layer in chosen.selective.values():
        _replace_forward(layer, _Recomputed(layer, keeps_costly=True))
    for layer in chosen.whole.values():
        is_measured = config.strategy == "by_size"
        limit = int(config.threshold_mb * 2**20)
        _replace_forward(layer, _BySize(layer, limit, group) if is_measured else _Recomputed(layer))


def activation_bytes(layer: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that one call of `layer` would keep for backward, without its parameters and inputs.

    Runs a forward and discards its result; random state and buffers are restored.
    """
    return _measure(layer, layer.forward, args, kwargs)


def _replace_forward(module: nn.Module, forward: Forward) -> None:
    module.forward = forward


class _Recomputed:
    """A layer's forward whose activations backward recomputes; buffers change only the first time."""

    def __init__(self, layer: nn.Module, *, keeps_costly: bool = False) -> None:
        self._layer = layer
        self._forward = layer.forward
        self._keeps_costly = keeps_costly

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph keeps its own state, and takes no other contexts than torch's
            contexts = _KEEP_COSTLY if self._keeps_costly else noop_context_fn
            return checkpoint(self._forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts around the first forward and around the second."""
        # Autograd's engine runs without function modes, and ring attention is one.
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # untyped in torch
        if not self._keeps_costly:
            return nullcontext(), self._as_before(modes, nullcontext())
        first, second = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]  # untyped in torch
        return first, self._as_before(modes, second)

    @contextmanager
    def _as_before(self, modes: list[TorchFunctionMode], inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Restore the modes of the first forward; running means and the like must not see a batch twice."""
        before = [buffer.clone() for buffer in self._layer.buffers()]
        try:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                stack.enter_context(inner)
                yield
        finally:
            for buffer, value in zip(self._layer.buffers(), before, strict=True):
                # .data: autograd may have saved the buffer for backward, and must not count this as a change.
                buffer.data.copy_(value)


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


_KEEP_COSTLY = partial(create_selective_checkpoint_contexts, _policy)


class _BySize:
    """Measures a layer at its first call in training, then decides whether to recompute it."""

    def __init__(self, layer: nn.Module, threshold_bytes: int, group: dist.ProcessGroup | None) -> None:
        self._layer = layer
        self._forward = layer.forward
        self._recomputed = _Recomputed(layer)
        self._threshold_bytes = threshold_bytes
        self._group = group
        self._is_large: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if self._is_large is None:
            self._is_large = self._largest(_measure(self._layer, self._forward, args, kwargs)) >= self._threshold_bytes
        return self._recomputed(*args, **kwargs) if self._is_large else self._forward(*args, **kwargs)

    def _largest(self, num_bytes: int) -> int:
        if self._group is None or self._group.size() == 1:
            return num_bytes
        device = next(self._layer.parameters()).device
        return int(all_reduce(torch.tensor(num_bytes, device=device), op="max", group=self._group))


def _measure(layer: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Run `forward` once to measure it; restores random state and buffers."""
    outside = {
        _address(tensor) for tensor in (*layer.parameters(), *args, *kwargs.values()) if isinstance(tensor, Tensor)
    }
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if _address(tensor) not in outside:
            kept[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    device = next(layer.parameters()).device
    buffers = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.enable_grad(),
        saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        forward(*args, **kwargs)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return sum(kept.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Offloading:
    """Keeps activations for backward in host memory: pinned, copied while a GPU computes.

    Parameters stay: they are on the device anyway, or are gathered again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forward = model.forward

    def bound_to(self, twin: nn.Module) -> _Offloading:
        """The same for a copy of the model, such as a pipeline stage."""
        made = _Offloading(twin)
        made._forward = type(twin).forward.__get__(twin)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_host() if torch.is_grad_enabled() else nullcontext():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        def pack(tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
            if tensor.device.type == "cpu" or is_param(tensor):
                return tensor
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return tensor.device, host.copy_(tensor, non_blocking=True)

        def unpack(packed: tuple[torch.device, Tensor] | Tensor) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            device, host = packed
            return host.to(device, non_blocking=True)

        with saved_tensors_hooks(pack, unpack):
            yield


def is_param(tensor: Tensor) -> bool:
    """Whether this is a parameter, or a view of one such as its transpose."""
    base = tensor if tensor._base is None else tensor._base
    return base.is_leaf and base.requires_grad
