"""Pipeline stages that record when they compute: the measured schedule."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.utils.spectral_norm import SpectralNorm
from typing_extensions import override

from torsh_distributed.events import step_notes
from torsh_distributed.parallel.models.probing import probing
from torsh_distributed.parallel.pipeline.microbatches import Microbatches
from torsh_distributed.parallel.pipeline.older_stage import OlderStage
from torsh_distributed.parallel.pipeline.schedule import Action, Kind
from torsh_distributed.parallel.torch_internals import _SpectralNorm

# When backward is split in two, older torch detaches a stage's outputs in place. An output that is also an input, such
# as a table of positions, then blocks the gradient in the next step. Drop with support for torch < 2.13.
_DETACHES_INPUTS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)

# It also sends gradients as they are: a DTensor, as tensor parallelism leaves one, has no memory to send from.
_SENDS_ANY_FORM = _DETACHES_INPUTS


@dataclass
class ActionRecorder:
    """Records the actions of this rank's current step, on its monotonic clock."""

    rank: int
    actions: list[Action] = field(default_factory=list)

    def take(self) -> list[Action]:
        """The actions recorded since the last call."""
        taken, self.actions = self.actions, []
        return taken


if TYPE_CHECKING or not hasattr(PipelineStage, "_shape_inference"):  # noqa: SIM108  # mypy follows this form alone
    _Base = PipelineStage
else:
    _Base = OlderStage


class TimedStage(_Base):
    """Torch's stage, which records the time of every forward and backward of a microbatch.

    Before the first step torch infers shapes by a forward on uninitialised memory; that is not recorded.
    """

    def __init__(self, *args: Any, recorder: ActionRecorder, microbatches: Microbatches, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder, self._microbatches = recorder, microbatches
        self._spectral = [module for module in self.submod.modules() if _has_spectral_norm(module)]

    # Shape inference of torch 2.13 and of torch 2.11; each has only one of them.
    @override
    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with probing(self.submod):
            return super()._forward_metadata_inference(*args, **kwargs)

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
        with probing(self.submod):
            return super()._shape_inference(*args, **kwargs)  # type: ignore[misc]  # not in torch 2.13

    @override
    def _to_tensor(self, arg: Any) -> Any:
        """What shapes are inferred on in torch 2.13: zeros in place of any values, which could be indices."""
        value = super()._to_tensor(arg)
        if not isinstance(arg, torch.Tensor):
            with torch.no_grad():
                value.zero_()
        return value

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._microbatches.current = fwd_chunk_id
        started = time.monotonic()
        with _own_error(), self._one_power_iteration(fwd_chunk_id):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._record("F", fwd_chunk_id, started)
        return out

    @contextmanager
    def _one_power_iteration(self, microbatch: int) -> Iterator[None]:
        """Spectral norms improve their estimate in every forward in training: once a step, as in one process."""
        modes = [(module, module.training) for module in self._spectral]
        for module, mode in modes:
            module.training = mode and microbatch == 0
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    @override
    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        with _own_error():
            out = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if _SENDS_ANY_FORM and bwd_chunk_id in self.bwd_cache:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(
                one.full_tensor() if isinstance(one, DTensor) else one for one in gradients
            )
        self._record("B" if kwargs.get("full_backward", True) else "I", bwd_chunk_id, started)
        return out

    @override
    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        out = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._record("W", bwd_chunk_id, started)
        return out

    @override
    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if backward_type == "input" and _DETACHES_INPUTS:
            inputs = bwd_kwargs["input_values"]
            outputs = tuple(
                output.clone() if any(output is one for one in inputs) else output
                for output in bwd_kwargs["stage_output"]
            )
            bwd_kwargs = {**bwd_kwargs, "stage_output": outputs}
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kwargs)

    def _record(self, kind: Kind, microbatch: int, started: float) -> None:
        ended = time.monotonic()
        self._recorder.actions.append(Action(self._recorder.rank, self.stage_index, kind, microbatch, started, ended))
        if step_notes.wants_phases():
            step_notes.note_phase("stage", started, ended)


@contextmanager
def _own_error() -> Iterator[None]:
    """Torch puts its own error, which lists the stage's tensors, in front of the one that says what is wrong."""
    try:
        yield
    except RuntimeError as error:
        is_torchs = "failed to run forward" in str(error) or "Failed to run stage backward" in str(error)
        if error.__cause__ is None or not is_torchs:
            raise
        raise error.__cause__ from None


def _has_spectral_norm(module: nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)
