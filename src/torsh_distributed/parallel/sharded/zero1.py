"""ZeRO-1: every rank holds the whole model, but the optimizer state of only a shard of it.

The optimizer works on shards that are views into the replica: while it steps, its groups hold this rank's rows of each
parameter (DTensors, as under FSDP2) with the same rows of the gradient; afterwards the rows of all ranks are gathered
into every replica. Between steps its groups hold the parameters themselves, so clipping, loss scaling and schedulers
see what they expect, while its state stays sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from torsh_distributed.comm.shared_memory.buffers import collective_buffer
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.data.data_strategy import DataParallel, GradientOptions
from torsh_distributed.parallel.data.ddp import refuse_sparse_shards
from torsh_distributed.parallel.data.replicated_params import batches
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.sharded.communication import gather
from torsh_distributed.parallel.state.whole_state import StateParts, carried
from torsh_distributed.parallel.whole_tensors.model_pieces import ModelPieces, shard_form
from torsh_distributed.plan import DdpConfig
from torsh_distributed.plan.sections.distributed import DistributedConfig


class ShardedOptimizerState:
    """Makes an optimizer over whole parameters keep only the state of this rank's rows; every rank constructs one.

    Correct for optimizers that are element-wise, or compute with DTensors: the same ones that work under FSDP2.
    Parameters for which `is_left` are left alone.
    """

    def __init__(
        self, optimizer: Optimizer, mesh: DeviceMesh, *, is_left: Callable[[Tensor], bool] = lambda _: False
    ) -> None:
        self._optimizer = optimizer
        self._mesh = mesh
        self._shards: dict[nn.Parameter, nn.Parameter] = {}
        self._grads: dict[nn.Parameter, DTensor] = {}
        for param in _params(optimizer):
            # A scalar and an empty tensor cannot be sharded: every rank updates them equally.
            if param.dim() > 0 and param.numel() and not is_left(param):
                self._shards[param] = nn.Parameter(_rows(param.data, mesh), requires_grad=param.requires_grad)
        self.cut_state()
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def cut_state(self) -> None:
        """Reduce whole optimizer state, such as was just loaded, to this rank's rows."""
        for param, shard in self._shards.items():
            if param in self._optimizer.state:
                self._optimizer.state[param] = carried(self._optimizer.state[param], shard)

    def shard_of(self, param: Tensor) -> Tensor:
        """This rank's rows of a parameter, as which its state is kept; the parameter itself if it is a scalar."""
        return self._shards[param] if isinstance(param, nn.Parameter) and param in self._shards else param

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            raise InvalidArgument(
                "a sharded optimizer takes no closure: gradients must be computed before its step",
                hint="compute the loss and call backward before step()",
            )
        for param, shard in self._shards.items():
            if param.untyped_storage().data_ptr() != _local(shard).untyped_storage().data_ptr():
                # The user wrote `param.data = …`: the rows are those of the new tensor.
                shard._local_tensor = _own_rows(param, self._mesh)  # type: ignore[attr-defined]  # it is a DTensor
            shard.grad = None if param.grad is None else self._rows_of_grad(param, param.grad)
        self._exchange(optimizer, self._shards)

    def _rows_of_grad(self, param: nn.Parameter, grad: Tensor) -> DTensor:
        """This rank's rows of a gradient, reusing the last step's DTensor, which is slower to build than to update."""
        known = self._grads.get(param)
        if known is None or known.stride() != grad.stride():
            known = self._grads[param] = _rows(grad, self._mesh)
        known._local_tensor = _own_rows(grad, self._mesh)
        return known

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._exchange(optimizer, {shard: param for param, shard in self._shards.items()})
        for param, shard in self._shards.items():
            if shard.grad is not None:
                self._grads[param]._local_tensor = _local(shard)  # frees the gradient's memory
                shard.grad = None
        self._gather_rows()

    @torch.no_grad()
    def _gather_rows(self) -> None:
        """Gather the rows that each rank updated into every replica, in messages of about 25 MB of one dtype."""
        trained = {param: shard for param, shard in self._shards.items() if param.requires_grad}
        group, num_ranks, rank = self._mesh.get_group(), self._mesh.size(), self._mesh.get_local_rank()
        for params in batches(list(trained)):
            lengths = [_rows_per_rank(param, num_ranks) * param[0].numel() for param in params]
            everyone = self._buffer(num_ranks * sum(lengths), params[0])
            by_rank = [torch.split(part, lengths) for part in everyone.view(num_ranks, -1)]
            for param, part in zip(params, by_rank[rank], strict=True):
                local = _local(trained[param]).reshape(-1)
                part[: local.numel()] = local
            gather(everyone, everyone.view(num_ranks, -1)[rank], group=group)
            for owner, parts in enumerate(by_rank):
                if owner == rank:
                    continue  # its rows are in place already
                for param, part in zip(params, parts, strict=True):
                    count = _rows_per_rank(param, num_ranks)
                    rows = param[owner * count : (owner + 1) * count]
                    rows.copy_(part[: rows.numel()].view(rows.shape))

    def _buffer(self, numel: int, like: Tensor) -> Tensor:
        """In memory that the ranks of a node share, where there is some: nothing is copied on the way then."""
        shared = collective_buffer(numel, like.dtype, self._mesh.get_group(), "shared") if like.is_cpu else None
        return like.new_empty(numel) if shared is None else shared

    @staticmethod
    def _exchange(optimizer: Optimizer, new_for: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters in the groups, and move their state to the new ones."""
        for group in optimizer.param_groups:
            group["params"] = [new_for.get(param, param) for param in group["params"]]
        for old, new in new_for.items():
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)


class _ShardedStateParts(StateParts):
    """Replicas whose optimizer state is sharded."""

    def __init__(self, state: ShardedOptimizerState) -> None:
        self._state = state

    @override
    def like(self, param: Tensor) -> Tensor:
        return self._state.shard_of(param)


class ShardedOptimizer(DataParallel):
    """Replicas as in data parallelism, with the optimizer's state sharded over the mesh's `shard` axis (ZeRO-1)."""

    def __init__(
        self,
        model: nn.Module,
        config: DdpConfig,
        distributed: DistributedConfig | None = None,
        *,
        mesh: Mesh,
        **options: Unpack[GradientOptions],
    ) -> None:
        refuse_sparse_shards(model)
        super().__init__(model, config, distributed, group=mesh.data_group, **options)
        self._mesh = mesh
        self._state: ShardedOptimizerState | None = None

    @override
    def pieces(self) -> ModelPieces:
        form = shard_form(self._mesh.slice("shard"))
        return ModelPieces(self._mesh.group("shard"), (form,), divides_replicas=True)

    @override
    def attach(self, optimizer: Optimizer) -> None:
        update = self._owner_updates.get(optimizer)
        is_left = (lambda _: False) if update is None else (lambda param: update.whole_shape(param) is not None)
        self._state = ShardedOptimizerState(optimizer, self._mesh.slice("shard"), is_left=is_left)

    @override
    def state_parts(self) -> StateParts:
        return StateParts() if self._state is None else _ShardedStateParts(self._state)

    @override
    def load_whole_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        super().load_whole_state(optimizer, state)
        assert self._state is not None, "parallelize() attaches the optimizer"
        self._state.cut_state()


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _rows_per_rank(tensor: Tensor, num_ranks: int) -> int:
    """As DTensor shards: equal parts, the last ones smaller or empty."""
    return -(-tensor.shape[0] // num_ranks)


def _rows(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a tensor that is equal on all ranks: a view, as a DTensor."""
    mine = _own_rows(tensor, mesh)
    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def _own_rows(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    count = _rows_per_rank(tensor, mesh.size())
    start = min(mesh.get_local_rank() * count, tensor.shape[0])
    return tensor.detach()[start : start + count]


def _local(shard: Tensor) -> Tensor:
    assert isinstance(shard, DTensor)
    held: Tensor = shard.to_local()
    return held.detach()
