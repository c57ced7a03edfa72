"""What `DistributedOptimizer` adds to an optimizer: gradients are reduced over the ranks while backward computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from torsh_distributed import known_variables
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.migrate.horovod.collectives.async_calls import sparse_allreduce_async
from torsh_distributed.migrate.horovod.collectives.horovod_compression import Compressor
from torsh_distributed.migrate.horovod.collectives.reduction_names import ReductionName
from torsh_distributed.migrate.horovod.horovod_errors import HorovodInternalError
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, set_size
from torsh_distributed.migrate.horovod.training.reduction_buckets import (
    BUCKET_BYTES,
    ReductionBucket,
    plan_reduction_buckets,
)
from torsh_distributed.migrate.horovod.world_state import world

_TAKE_SPARSE = (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)
_DENSE_ONLY = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, *_TAKE_SPARSE)
)


@dataclass
class GradientReduction:
    """The state of a reducing optimizer: its settings, its buckets, and how far this step is."""

    op: ReductionName
    prescale: float
    postscale: float
    process_set: ProcessSet
    compression: type[Compressor] | Compressor
    names: dict[nn.Parameter, str]
    passes: int
    sparse_as_dense: bool
    groups: int | Sequence[Sequence[Tensor]] | None
    buckets: list[ReductionBucket] = field(default_factory=list)
    bucket_of: dict[nn.Parameter, ReductionBucket] = field(default_factory=dict)
    passes_left: dict[nn.Parameter, int] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)
    num_steps: int = 0
    is_synchronized: bool = False
    must_synchronize: bool = True

    @property
    def is_travelling(self) -> bool:
        """Whether gradients are in flight."""
        return any(bucket.is_travelling for bucket in self.buckets)

    def drop_step(self) -> None:
        """Give up the gradients of this step."""
        for bucket in self.buckets:
            bucket.drop()
        self.begin_step()
        self.is_synchronized = False

    def begin_step(self) -> None:
        """Expect every gradient again."""
        for bucket in self.buckets:
            bucket.reset()
        self.passes_left = dict.fromkeys(self.bucket_of, self.passes)


class ReducingOptimizer(Optimizer):
    """Mixed in before the class of the wrapped optimizer; `DistributedOptimizer` makes such a class.

    `step` waits for the gradients and updates. Gradients that this rank did not compute count as zero, so ranks may
    run different parts of the model.
    """

    _reduction: GradientReduction

    @property
    def _parameter_names(self) -> dict[nn.Parameter, str]:
        return self._reduction.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after so many backward passes from now on; gradients of the passes add up."""
        if passes <= 0:
            raise InvalidArgument("backward_passes_per_step must be above 0", got=passes)
        self._reduction.passes = passes
        self._reduction.begin_step()

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; for clipping and the like before `step` in `skip_synchronize()`."""
        reduction = self._reduction
        if not reduction.bucket_of:
            reduction.is_synchronized = True
            return
        held = (param for group in self.param_groups for param in group["params"] if param.grad is not None)
        late = [reduction.names[param] for param in held if param not in reduction.bucket_of]
        if late:
            raise InvalidArgument(
                f"{late[0]} was unfrozen after hvd.DistributedOptimizer was made, so its gradient is this rank's own",
                hint="unfreeze first, or make a new hvd.DistributedOptimizer after the change; under Horovod every rank"
                " would update it by itself",
                names=late,
            )
        try:
            for bucket in reduction.buckets:
                if not bucket.is_travelling:
                    bucket.submit()
            sparse = [param for bucket in reduction.buckets for param in bucket.finish()]
            if reduction.sparse_as_dense:
                self._make_sparse_again(sparse)
            else:
                self._reduce_sparse(sparse)
        except HorovodInternalError:
            reduction.drop_step()
            raise
        reduction.num_steps += 1
        reduction.begin_step()
        reduction.is_synchronized = True

    def _reduce_sparse(self, params: Sequence[nn.Parameter]) -> None:
        reduction = self._reduction
        waits: list[tuple[nn.Parameter, Callable[[], Tensor]]] = []
        for param in params:
            grad = param.grad
            if grad is None or not grad.is_sparse:
                # Another rank's gradient is sparse; ours is dense, or there is none.
                grad = (param.detach() * 0 if grad is None else grad.detach()).to_sparse(1)
            name = f"{reduction.bucket_of[param].name}.{reduction.names[param]}"
            waits.append((param, sparse_allreduce_async(grad, name, reduction.op, reduction.process_set)))
        for param, wait in waits:
            param.grad = None
            param.grad = wait().coalesce()

    def _make_sparse_again(self, params: Sequence[nn.Parameter]) -> None:
        """Gradients that travelled as dense ones: the optimizer gets them as backward made them.

        Unless it is one of torch's that take dense ones alone; Horovod has those fail.
        """
        if any(isinstance(self, kind) for kind in _DENSE_ONLY):
            return
        for param in params:
            grad = param.grad
            assert grad is not None, "it was reduced"
            param.grad = None
            param.grad = grad.to_sparse(1)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within this, `step` does not wait again for gradients that `synchronize` has brought."""
        self._reduction.must_synchronize = False
        try:
            yield
        finally:
            self._reduction.must_synchronize = True

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients, then update. With a closure they are reduced after each time it is called."""
        reduction = self._reduction
        if closure is not None:
            return super().step(self._reducing(closure))
        if reduction.must_synchronize:
            if reduction.is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): gradients are reduced twice; write "
                    "`with optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2,
                )
            self.synchronize()
        reduction.is_synchronized = False
        return super().step()

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            if self._reduction.must_synchronize:
                self.synchronize()
            self._reduction.is_synchronized = False
            return loss

        return reduced

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's own. AssertionError if gradients are in flight."""
        if self._reduction.is_travelling:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(set_to_none=set_to_none)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the optimizer's own; gradients of a step that had begun are waited for and dropped."""
        self._reduction.drop_step()
        super().load_state_dict(state_dict)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters are reduced from the next step on."""
        super().add_param_group(param_group)
        reduction: GradientReduction | None = getattr(self, "_reduction", None)
        if reduction is None:
            return
        number = len(self.param_groups) - 1
        for index, param in enumerate(self.param_groups[-1]["params"]):
            reduction.names.setdefault(param, f"allreduce.noname.{number}.{index}")
        self._watch_gradients()

    # --- in backward ------------------------------------------------------------------------------------------

    def _watch_gradients(self) -> None:
        """Plan the buckets and hook the parameters; called again when parameters are added."""
        reduction = self._reduction
        for hook in reduction.hooks:
            hook.remove()
        reduction.hooks, reduction.buckets, reduction.bucket_of = [], [], {}
        process_set = reduction.process_set
        is_member = bool(process_set.included()) if process_set.ranks is not None else False
        if not is_member or (set_size(process_set) == 1 and not known_variables.is_on("HOROVOD_ELASTIC")):
            return
        state = world()
        assert process_set.process_set_id is not None, "registered, because its size is known"
        number = next(state.sets[process_set.process_set_id].optimizers)
        params = [param for group in self.param_groups for param in group["params"] if param.requires_grad]
        limit_bytes = min(BUCKET_BYTES, state.settings.fusion_threshold_bytes)
        planned = plan_reduction_buckets(params, limit_bytes=limit_bytes, groups=reduction.groups)
        for index, members in enumerate(planned):
            names = [reduction.names[param] for param in members]
            label = names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
            bucket = ReductionBucket(f"optimizer.{number}.{index}.{label}", index, members, names, reduction)
            reduction.buckets.append(bucket)
            for param in members:
                reduction.bucket_of[param] = bucket
                hook = param.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]  # untyped in torch
                reduction.hooks.append(hook)
        reduction.begin_step()

    def _note_gradient(self, param: Tensor) -> None:
        assert isinstance(param, nn.Parameter), "hooks are on parameters"
        reduction = self._reduction
        left = reduction.passes_left[param]
        if left <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        reduction.passes_left[param] = left - 1
        if left > 1:
            return
        bucket = reduction.bucket_of[param]
        bucket.num_missing -= 1
        if bucket.num_missing == 0:
            bucket.submit()

    def inner_step(self) -> Any:
        """The update alone, without any communication."""
        return super().step()
