"""The interface between the Engine and a way to split training over ranks: one class per way."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_distributed.comm.collectives.reductions import all_reduce
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts
from torsh_distributed.parallel.state import whole_state
from torsh_distributed.parallel.state.held_state import (
    HeldState,
    SavedState,
    StoredOptimizer,
    held_state,
    load_model,
    load_optimizer,
)
from torsh_distributed.parallel.state.whole_state import StateParts, named_params
from torsh_distributed.parallel.whole_tensors.model_pieces import ModelPieces, owner_update
from torsh_distributed.parallel.whole_tensors.owner_update import OwnedState, OwnerUpdate
from torsh_distributed.plan import CompressConfig, DdpConfig, FsdpConfig

_log = logging.getLogger(__name__)

LossFn = Callable[[Any, Any], Tensor]
"""From the model's output and the targets to the mean loss."""

ComputeLoss = Callable[[nn.Module, Any, LossFn | None], Tensor]
"""From a model, a batch and an optional loss_fn to the loss: the plain computation."""


class Strategy(ABC):
    """A model spread over the world: what to call, who gets which data, how gradients and numbers are averaged.

    The optimizer is built, or given its final parameters, after the strategy: a strategy may replace the model's
    parameters by shards of them, but keeps their names.
    """

    _owner_updates: Mapping[Optimizer, OwnerUpdate] = {}
    """For optimizers that look at whole tensors, of which this rank holds parts."""

    @property
    @abstractmethod
    def model(self) -> nn.Module:
        """The module to call in forward: the user's model, wrapped."""

    @property
    def unwrapped(self) -> nn.Module:
        """The user's own model, whose parameters are trained."""
        inner = getattr(self.model, "module", self.model)
        assert isinstance(inner, nn.Module)
        return inner

    @property
    def whole_model(self) -> nn.Module:
        """The user's model with all its modules; those that other ranks hold are on the meta device."""
        return self.unwrapped

    def reshard(self) -> None:  # noqa: B027 (most strategies gather nothing)
        """Free what was left gathered, as after evaluation; before state is read or written."""

    @property
    def has_whole_forward(self) -> bool:
        """Whether the user's model can be called as it was given: its own methods work on this rank's inputs."""
        return True

    @property
    def samples_group(self) -> dist.ProcessGroup | None:
        """The ranks that work on different samples or tokens; None without a process group."""
        return dist.group.WORLD if dist.is_initialized() else None

    @property
    @abstractmethod
    def data_rank(self) -> int:
        """Which part of every batch this rank works on."""

    @property
    @abstractmethod
    def data_degree(self) -> int:
        """The number of parts a batch is divided into."""

    @property
    def random_part(self) -> int | None:
        """Ranks with another number drop other activations; those with the same one have the same activations.

        None: there is one part, which draws from the process's own generator.
        """
        return self.data_rank if self.data_degree > 1 else None

    @property
    def forward_is_collective(self) -> bool:
        """Whether ranks communicate in forward: then all must call it equally often, also in evaluation."""
        return False

    @property
    def follows_freezing(self) -> bool:
        """Whether `requires_grad` of parameters may be changed between steps."""
        return False

    @property
    def steps_alone(self) -> bool:
        """Whether a rank's step involves no other rank; then nothing in a step may wait for one."""
        return False

    def together(self) -> AbstractContextManager[None]:
        """Around what ranks do between steps with the parameters of all: evaluate, export; every rank calls this."""
        return nullcontext()

    @property
    def rows_multiple(self) -> int:
        """A pass of training takes a multiple of so many rows, or fewer than that."""
        return 1

    def bind(self, optimizer: Optimizer) -> None:
        """Called once with the optimizer over the final parameters, on every rank, before its first step.

        An optimizer that looks at whole tensors gets them; one that cannot work under this strategy is refused.
        """
        pieces = self.pieces()
        if pieces is not None:
            found = owner_update(optimizer, self.unwrapped, pieces, self.state_parts())
            if found is not None:
                self._owner_updates = {**self._owner_updates, optimizer: found}
            self._cut_state(optimizer)
        self.attach(optimizer)

    def before_backward(self, loss: Tensor) -> None:  # noqa: B027 (most strategies need not know)
        """Called on every rank before each backward, with the loss that it starts from."""

    def after_backward(self, loss: Tensor) -> None:  # noqa: B027 (most strategies need not know)
        """Called on every rank after each backward: what must not become an update is refused here."""

    def attach(self, optimizer: Optimizer) -> None:  # noqa: B027 (most strategies leave the optimizer alone)
        """A strategy may hook into the steps of the optimizer that was bound."""

    def pieces(self) -> ModelPieces | None:
        """How parameters are spread, for an optimizer; None where every rank has all of them whole."""
        return None

    def _cut_state(self, optimizer: Optimizer) -> None:
        """Cut state that an optimizer has from before the model was split to what this rank holds."""
        if isinstance(optimizer, StoredOptimizer):  # it took the state over in pieces
            return
        parts = self.optimizer_parts(optimizer)
        for name, param in named_params(self.unwrapped).items():
            shape = parts.runs(parts.first_name(name), param.shape)[0]
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.shape != param.shape and list(value.shape) == shape:
                    optimizer.state[param][key] = parts.part(parts.first_name(name), value, param)

    def loss(self, model: nn.Module, batch: Any, loss_fn: LossFn | None, compute: ComputeLoss) -> Tensor:
        """The loss of this rank's microbatch: `compute`, unless the strategy runs forward differently.

        `model` is `self.model` in training, `self.unwrapped` in evaluation, where gradients are off.
        """
        return compute(model, batch, loss_fn)

    def expect_scale(self, scale: Tensor | float) -> None:  # noqa: B027 (most strategies run backward when it is called)
        """Called before forward: its loss will be multiplied by `scale` before backward."""

    @property
    def splits_loss(self) -> bool:
        """Whether the strategy itself combines losses of parts: of microbatches in a pipeline, of split sequences."""
        return False

    def count_labels(self, rule: LabelRule, parts: PartCounts | None = None) -> None:  # noqa: B027 (most strategies compute the loss of whole rows)
        """Called once it is known what the loss averages, for strategies that compute it part by part.

        `parts` tells more than `rule` where all positions of a row are together.
        """

    def weighs_by_loss(self, *, has_several: bool) -> bool:
        """Whether parts may weigh by what only their loss tells; `has_several`: it has several means."""
        return True

    def take_count(self) -> Tensor | None:
        """What the last loss counted, where only its parts told and not all of them were computed on this rank."""
        return None

    def sum_over_samples(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the ranks that have different samples, on the device; every rank calls this.

        Ranks that have different tokens of the same samples add theirs too.
        """
        group = self.samples_group
        return value if group is None or group.size() == 1 else all_reduce(value.clone(), group=group)

    @property
    def num_sample_ranks(self) -> int:
        """The ranks over which gradients and losses are averaged."""
        group = self.samples_group
        return 1 if group is None else group.size()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply all averaged gradients of this rank; every rank calls this, after the last backward of a step."""
        grads = [param.grad for param in self.unwrapped.parameters() if param.grad is not None]
        for grad in grads:
            grad.mul_(factor.to(grad.device))

    @abstractmethod
    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward, and again around backward, of a microbatch: the last of a step averages gradients."""

    @abstractmethod
    def mean_loss(self, loss: Tensor) -> PendingNumber:
        """Start averaging a scalar over the parts of the batch; every rank calls this at the same point of a step."""

    def mean_over_ranks(self, value: Tensor) -> PendingNumber:
        """The same outside of steps."""
        return self.mean_loss(value)

    @abstractmethod
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scale all gradients so their norm over the whole model is at most `max_norm`; returns the norm before.

        None only measures. A scalar, equal on every rank; on a GPU the host does not wait for it here.
        """

    @abstractmethod
    def take_comm_s(self) -> float | None:
        """Seconds spent sending gradients since the last call; None where that is not measured."""

    @property
    def compressor(self) -> GradientCompressor | None:
        """What makes gradients smaller; None where they travel as they are."""
        return None

    def use_compression(self, config: CompressConfig) -> None:
        """Send gradients in another form from the next step on; every rank calls this between steps.

        Raises FeatureNotAvailable where the form is part of how the model was split.
        """
        raise FeatureNotAvailable(
            f"{type(self).__name__} cannot change how it sends gradients while it runs",
            hint="set compress.method in the plan before the job starts; data parallelism alone can change it later",
            feature="compress",
        )

    def use_buckets(self, config: DdpConfig) -> None:
        """Send gradients in buckets of other sizes from the next step on; every rank calls this between steps.

        Raises FeatureNotAvailable where gradients do not travel in buckets.
        """
        raise FeatureNotAvailable(
            f"{type(self).__name__} sends no buckets whose size could change while it runs",
            hint="data parallelism and ZeRO-1 do",
            feature="ddp.max_bucket_size_mb",
        )

    def use_prefetch(self, config: FsdpConfig) -> None:
        """Gather pieces so far ahead from the next step on; every rank calls this between steps.

        Raises FeatureNotAvailable where nothing is gathered.
        """
        raise FeatureNotAvailable(
            f"{type(self).__name__} gathers no pieces that could be prefetched",
            hint="mesh.shard with full_shard or shard_grad_op does",
            feature="fsdp.forward_prefetch",
        )

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on, because the loss scale changed; every rank calls this."""
        if self.compressor is not None:
            self.compressor.rescale(factor)

    def state_dict(self) -> dict[str, Any]:
        """What only this rank holds beyond model and optimizer: the error that compression carries over."""
        return {} if self.compressor is None else {"compressor": self.compressor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict()` of the same rank in a world of the same size."""
        if self.compressor is not None and "compressor" in state:
            self.compressor.load_state_dict(state["compressor"])
        elif state:
            _log.warning("the state was saved under another compression: the error it carried over is lost")

    def whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """`model` and `optimizer` state by parameter name: whole tensors, equal on every rank; all ranks call this."""
        self.reshard()
        parts = self.state_parts()
        return {
            "model": whole_state.model_state(self.whole_model, parts),
            "optimizer": whole_state.optimizer_state(self.unwrapped, optimizer, self.optimizer_parts(optimizer)),
        }

    def whole_tensors(self) -> Iterator[tuple[str, Any]]:
        """The entries of the model's state, whole, one at a time; all ranks iterate to the end."""
        self.reshard()
        yield from whole_state.iterate_model_state(self.whole_model, self.state_parts())

    def state_names(self) -> list[str]:
        """The names that `whole_tensors` gives, in its order."""
        return [whole_state.plain_name(name) for name in self.whole_model.state_dict()]

    def shared_names(self) -> dict[str, str]:
        """Every further name of a shared tensor to its first one."""
        return whole_state.shared_names(self.whole_model)

    def load_whole_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of `whole_state()`, saved under any strategy and world size; equal on all ranks."""
        self.reshard()
        parts = self.state_parts()
        whole_state.load_model_state(self.whole_model, state["model"], parts)
        whole_state.load_optimizer_state(self.unwrapped, optimizer, state["optimizer"], self.optimizer_parts(optimizer))

    def state_parts(self) -> StateParts:
        """How this rank's tensors lie in the whole ones."""
        return StateParts()

    def optimizer_parts(self, optimizer: Optimizer) -> StateParts:
        """How this rank's part of the optimizer's state lies in the whole."""
        update = self._owner_updates.get(optimizer)
        return self.state_parts() if update is None else OwnedState(self.state_parts(), update)

    def whole_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """All of a parameter's gradient, of which this rank holds `gradient`; all ranks call this, in one order."""
        return self.state_parts().from_owner(name, gradient)

    def held_state(self, optimizer: Optimizer) -> HeldState:
        """This rank's part of model and optimizer, nothing gathered; every rank calls this."""
        self.reshard()
        parts = self.optimizer_parts(optimizer)
        return held_state(self.whole_model, self.unwrapped, optimizer, self.state_parts(), parts)

    def load_held_state(self, optimizer: Optimizer, saved: SavedState, *, with_optimizer: bool = True) -> None:
        """Load this rank's part of what `held_state` of any plan and world size described; every rank calls this."""
        self.reshard()
        load_model(self.whole_model, saved, self.state_parts())
        if with_optimizer:
            load_optimizer(self.unwrapped, optimizer, saved, self.optimizer_parts(optimizer))


class PendingNumber(ABC):
    """A number that is communicated while the device computes."""

    @abstractmethod
    def wait(self) -> float:
        """Wait for the number and return it."""


def check_one_device(model: nn.Module) -> torch.device:
    """The device of all parameters and buffers, or InvalidArgument naming one on each of two devices."""
    seen: dict[torch.device, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        seen.setdefault(tensor.device, name)
    if len(seen) > 1:
        (one, first), (two, second), *_ = seen.items()
        raise InvalidArgument(
            f"the model is on two devices: {first} on {one}, {second} on {two}",
            hint="move the whole model to one device before parallelize()",
        )
    return next(iter(seen), torch.device("cpu"))
