"""`DistributedOptimizer`: an optimizer of the same class that reduces gradients over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.basics import rocm_built
from torsh_distributed.migrate.horovod.collectives.async_calls import allreduce_async
from torsh_distributed.migrate.horovod.collectives.horovod_compression import CodecCompressor, Compression, Compressor
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.collectives.reduction_names import (
    Adasum,
    Average,
    ReductionName,
    chosen_reduction,
)
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, global_process_set
from torsh_distributed.migrate.horovod.training.reducing_optimizer import GradientReduction, ReducingOptimizer
from torsh_distributed.migrate.horovod.world_state import world


@dataclass
class AdasumSettings:
    """How steps are folded."""

    names: dict[nn.Parameter, str]
    compression: type[Compressor] | Compressor
    passes: int


class AdasumOptimizer(Optimizer):
    """Mixed in before the class of the wrapped optimizer; `DistributedOptimizer(op=Adasum)` makes such a class."""

    _adasum: AdasumSettings

    @property
    def _parameter_names(self) -> dict[nn.Parameter, str]:
        return self._adasum.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Note how many backward passes come before a step; their gradients add up on this rank."""
        if passes <= 0:
            raise InvalidArgument("backward_passes_per_step must be above 0", got=passes)
        self._adasum.passes = passes

    def synchronize(self) -> None:
        """Nothing to wait for: steps are folded, not gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Has no meaning here: AssertionError."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's gradients, fold the differences of all ranks, and move on from the starting point."""
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        starts = [param.detach().clone() for param in params]
        loss = super().step() if closure is None else super().step(closure)
        settings = self._adasum
        with torch.no_grad():
            folded = []
            for param, start in zip(params, starts, strict=True):
                small, context = settings.compression.compress(param.detach() - start)
                name = f"adasum.{settings.names[param]}"
                folded.append((allreduce_async(small.contiguous(), name=name, op=Adasum), context))
            for param, start, (handle, context) in zip(params, starts, folded, strict=True):
                param.copy_(start + settings.compression.decompress(synchronize(handle), context))
        return loss

    def inner_step(self) -> Any:
        """The update alone, without any communication."""
        return super().step()


Groups = int | Sequence[Sequence[Tensor]] | None


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReductionName | None = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class, name and state as `optimizer` whose `step` uses gradients of all ranks.

    Gradients of `backward_passes_per_step` passes add up before they are reduced. With `op=Average` they are divided
    by `gradient_predivide_factor` before and multiplied after they are summed. `groups`: a number of groups, or lists
    of parameters, that travel together; otherwise they are packed by size. Every rank of `process_set` calls this
    with the same parameters in the same order.
    """
    world()
    reduction = chosen_reduction(op, None)
    if backward_passes_per_step <= 0:
        raise InvalidArgument("backward_passes_per_step must be above 0", got=backward_passes_per_step)
    if gradient_predivide_factor != 1.0:
        if rocm_built():
            raise InvalidArgument("gradient_predivide_factor is not supported with ROCm")
        if reduction != Average:
            raise InvalidArgument(
                "gradient_predivide_factor works with op=hvd.Average only", hint="leave it out", op=str(reduction)
            )
    if num_groups:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_groups(groups)
    names = _names(optimizer, named_parameters)
    if reduction == Adasum and world().size > 1:
        if process_set.process_set_id != 0:
            raise NotImplementedError("Adasum works on the global process set only")
        if isinstance(compression, CodecCompressor):
            raise InvalidArgument("a codec averages gradients, and Adasum does not", hint="use Compression.fp16")
        wrapped = _subclass(optimizer, AdasumOptimizer)
        wrapped._adasum = AdasumSettings(names, compression, backward_passes_per_step)
        return wrapped
    wrapped = _subclass(optimizer, ReducingOptimizer)
    wrapped._reduction = GradientReduction(
        op=Average if reduction == Adasum else reduction,
        prescale=1.0 / gradient_predivide_factor,
        postscale=gradient_predivide_factor,
        process_set=process_set,
        compression=compression,
        names=names,
        passes=backward_passes_per_step,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
    )
    wrapped._watch_gradients()
    return wrapped


def _subclass(optimizer: Optimizer, mixin: type[Optimizer]) -> Any:
    """The same optimizer, with its groups and state, as a subclass of its class with the same name.

    A `step` that a learning-rate scheduler has wrapped is left behind: the scheduler counts steps of the object that
    it was given.
    """
    kind = type(optimizer)
    made = cast(Any, type(kind.__name__, (mixin, kind), {"__module__": kind.__module__}))
    wrapped = made.__new__(made)
    wrapped.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    return wrapped


def _names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]] | None
) -> dict[nn.Parameter, str]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return {
            param: f"allreduce.noname.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise InvalidArgument(
            "named_parameters should be a sequence of tuples (name, parameter)",
            hint="pass model.named_parameters()",
        )
    seen: set[str] = set()
    twice = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]  # add() as a test
    if twice:
        raise InvalidArgument("parameter names in named_parameters must be unique", duplicates=twice)
    named = {param: name for name, param in pairs}
    num_unnamed = sum(param not in named for param in params)
    if num_unnamed:
        raise InvalidArgument(
            "named_parameters was specified, but one or more model parameters were not named",
            hint="name every parameter of the optimizer, or none",
            unnamed=num_unnamed,
        )
    return named


def _check_groups(groups: Groups) -> None:
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    if not isinstance(groups, list | tuple) or any(not isinstance(group, list | tuple) for group in groups):
        raise InvalidArgument("groups is a number, 0 or above, or a list of lists of parameters", got=repr(groups)[:80])
    seen: set[int] = set()
    for group in groups:
        for one in group:
            if not isinstance(one, Tensor):
                raise InvalidArgument("groups must consist of parameters", got=type(one).__name__)
            if id(one) in seen:
                raise InvalidArgument("a parameter can be in one group only", shape=tuple(one.shape))
            seen.add(id(one))
