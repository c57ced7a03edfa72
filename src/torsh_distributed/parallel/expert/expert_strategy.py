"""Data parallelism for models with spread experts: averages each gradient over the ranks that hold its parameter."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.collectives.moves import broadcast
from torsh_distributed.comm.recording.span_account import covered_s
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.data.bucket_reduction import bucket_reducer
from torsh_distributed.parallel.data.data_strategy import DataParallel
from torsh_distributed.parallel.expert.balancing.balance import LoadBalancer
from torsh_distributed.parallel.expert.layer import moe_layers
from torsh_distributed.parallel.expert.placed_experts import placed_experts
from torsh_distributed.parallel.expert.stacked_experts import (
    SpreadExperts,
    cut_stack,
    cut_state,
    gather_stack,
    gather_state,
    spread_params,
)
from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES, REPLICA_AXES
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.mesh.mesh_reduction import HeldGradients, clip_to_norm, grad_norm
from torsh_distributed.parallel.state.whole_state import StateParts
from torsh_distributed.parallel.strategy import check_one_device
from torsh_distributed.parallel.whole_tensors.model_pieces import ModelPieces, cut_form
from torsh_distributed.plan import DdpConfig
from torsh_distributed.plan.sections.distributed import DistributedConfig


class ExpertDataParallel(DataParallel):
    """Experts spread over `ep`; all other parameters replicated on every rank that has a part of the batch.

    A step equals that of one process on the whole batch. Backward through the exchange already sums the gradients of
    experts over the ranks of `ep`; they are then summed over the replicas of the expert (`dp`, `cp`) and divided by
    the number of parts of the batch. DDP averages all other gradients over every part.
    """

    def __init__(
        self, model: nn.Module, config: DdpConfig, distributed: DistributedConfig | None = None, *, mesh: Mesh
    ) -> None:
        self._ep = mesh.group("ep")
        replicas = mesh.group(*REPLICA_AXES)
        data = mesh.group(*GRADIENT_AXES)
        _spread(model, ep=self._ep, replicas=replicas, data=data)
        spread = spread_params(model)
        self._experts = [param for _, param in spread.values() if param.requires_grad]
        ids = {id(param) for _, param in spread.values()}
        names = [name for name, param in model.named_parameters() if id(param) in ids]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
        super().__init__(model, config, distributed, group=data)
        self._reduce = bucket_reducer(distributed or DistributedConfig(), replicas, check_one_device(model))
        self._num_replicas, self._replicas = replicas.size(), replicas.group_name
        self._is_last = True
        self.waits_for_update = False
        """Whether `average_experts` averages, not backward: for loops that learn afterwards which backward was last."""
        self._pending: list[tuple[torch.futures.Future[Tensor], float]] = []
        self._intervals: list[tuple[float, float]] = []
        for param in self._experts:
            param.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        self._balancer: LoadBalancer | None = None

    @property
    @override
    def follows_freezing(self) -> bool:
        return False  # which experts are averaged is noted once

    @property
    @override
    def forward_is_collective(self) -> bool:
        return self.data_degree > 1

    @override
    def attach(self, optimizer: Optimizer) -> None:
        super().attach(optimizer)
        whole = self._whole_names(optimizer)
        for name, (layer, param) in spread_params(self.unwrapped).items():
            for key, value in optimizer.state.get(param, {}).items():
                if name not in whole and isinstance(value, Tensor) and value.dim() and len(value) != len(param):
                    optimizer.state[param][key] = cut_stack(value, layer).clone()
        self._balancer = balance_load(self.unwrapped, optimizer, has_owners=bool(whole))

    def _whole_names(self, optimizer: Optimizer) -> set[str]:
        """The parameters whose state the optimizer keeps whole, on one rank each."""
        update = self._owner_updates.get(optimizer)
        return set() if update is None else update.spread_names

    @override
    def pieces(self) -> ModelPieces:
        return ModelPieces(self._ep, (cut_form(0, self._ep),))

    @override
    @contextmanager
    def accumulating(self, *, is_last: bool) -> Iterator[None]:
        self._is_last = is_last
        try:
            with super().accumulating(is_last=is_last):
                yield
        finally:
            self._is_last = True

    @override
    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        experts = [param.grad for param in self._experts if param.grad is not None]
        spread = {id(grad) for grad in experts}
        held = [param.grad for param in self.unwrapped.parameters() if param.grad is not None]
        others = [grad for grad in held if id(grad) not in spread]
        # Experts are spread: their part of the norm is what all ranks of `ep` hold together.
        norm = grad_norm([HeldGradients(experts, (self._ep,)), self._equal_on_all_ranks(others)], self._device)
        clip_to_norm(held, norm, max_norm)
        return norm

    @override
    def take_comm_s(self) -> float | None:
        """As in DataParallel; expert gradients are timed separately, so time in which both are sent counts twice."""
        intervals, self._intervals = self._intervals, []
        others = super().take_comm_s()
        return None if others is None else others + covered_s(intervals)

    @override
    def state_parts(self) -> StateParts:
        return SpreadExperts(self.unwrapped)

    @override
    def whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        whole = self._whole_names(optimizer)
        return gather_state(self.unwrapped, optimizer, super().whole_state(optimizer), whole=whole)

    @override
    def whole_tensors(self) -> Iterator[tuple[str, Any]]:
        spread = spread_params(self.unwrapped)
        for name, value in super().whole_tensors():
            yield name, gather_stack(value, spread[name][0]) if name in spread else value

    @override
    def whole_gradient(self, name: str, gradient: Tensor) -> Tensor:
        spread = spread_params(self.unwrapped)
        return gather_stack(gradient, spread[name][0]) if name in spread else super().whole_gradient(name, gradient)

    @override
    def load_whole_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        whole = self._whole_names(optimizer)
        super().load_whole_state(optimizer, cut_state(self.unwrapped, state, whole=whole))

    def _on_gradient(self, param: Tensor) -> None:
        """Runs in backward, when the gradient of an expert stack is complete: on every rank, in the same order."""
        assert param.grad is not None
        if not self._is_last or self.waits_for_update:
            return
        param.grad.div_(self.data_degree)
        if self._num_replicas == 1:
            return
        if not self._pending:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        started = time.monotonic()
        self._pending.append((self._reduce(param.grad), started))

    def average_experts(self) -> None:
        """Average the gradients of experts before an update, if `waits_for_update`; every rank calls this once."""
        for param in self._experts:
            if param.grad is None:  # other ranks may have one, and all of them reduce
                param.grad = torch.zeros_like(param)
            param.grad.div_(self.data_degree)
            if self._num_replicas > 1:
                self._pending.append((self._reduce(param.grad), time.monotonic()))
        self._finish()

    def _finish(self) -> None:
        """Runs at the end of backward; waits for the gradients."""
        pending, self._pending = self._pending, []
        for future, started in pending:
            with events.waiting("average gradients", self._replicas):
                future.wait()
            self._intervals.append((started, time.monotonic()))


def balance_load(model: nn.Module, optimizer: Optimizer, *, has_owners: bool) -> LoadBalancer | None:
    """Move or lend experts after optimizer steps if the layers' config asks for it; every rank calls this.

    `has_owners`: the optimizer needs whole tensors, whose state is on one rank each.
    """
    layers = moe_layers(model)
    if not any(layer.config.watches_load for layer in layers.values()):
        return None
    if has_owners:
        raise InvalidArgument(
            f"{type(optimizer).__name__} needs whole stacks of experts, which cannot move between ranks then",
            hint="leave expert.rebalance_threshold and expert.hot_copies out, or use AdamW",
        )
    return LoadBalancer(layers, optimizer)


def _spread(model: nn.Module, *, ep: dist.ProcessGroup, replicas: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
    """Give every layer its groups; expert weights become those of the first rank that holds them."""
    for placed in placed_experts(model).values():
        if placed.group is None:
            for param in placed.stacked().values():
                broadcast(param.data, dist.get_process_group_ranks(data)[0], group=data)
            placed.spread(ep)
    for name, layer in moe_layers(model).items():
        is_whole = layer.group is None
        source = dist.get_process_group_ranks(data if is_whole else replicas)[0]
        for param in layer.experts.stacked().values():
            broadcast(param.data, source, group=data if is_whole else replicas)
        if is_whole:
            layer.spread(ep, data)
        elif layer.group is not None and dist.get_process_group_ranks(layer.group) != dist.get_process_group_ranks(ep):
            raise InvalidArgument(
                f"{name} has its experts on other ranks than the mesh",
                hint="build MoELayer without a group; its experts are then spread as the plan says",
                layer=dist.get_process_group_ranks(layer.group),
                ep=dist.get_process_group_ranks(ep),
            )
        else:
            layer.router.data_group = data
