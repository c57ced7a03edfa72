"""Optimizer state alone leaves the device: parameters and gradients stay with whoever looks after them."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.offload.budget import GB, make_store, place_state, workspace_bytes
from torsh_distributed.parallel.offload.offload_stats import OffloadStats, TierUse
from torsh_distributed.parallel.offload.paging.pressure import POLICIES, PressureLadder
from torsh_distributed.parallel.offload.storage.forms import FORMS
from torsh_distributed.parallel.offload.storage.mover import CudaMover, HostMover
from torsh_distributed.parallel.offload.storage.pieces import Piece, cut, max_numel, write
from torsh_distributed.parallel.offload.storage.tiers import Ledger
from torsh_distributed.parallel.offload.update.adam import require_adam
from torsh_distributed.parallel.offload.update.optimizer import OffloadedOptimizer
from torsh_distributed.parallel.offload.update.targets import ParamTarget, flat_of, is_updatable_in_place, local_of
from torsh_distributed.plan.sections.offload import OffloadConfig


class StateOffload:
    """Master values and moments of an optimizer in the store; `optimizer` is the one to use from here on.

    Works on parameters as they are: plain, in DDP, or DTensors, of which each rank keeps the state of its own shard
    (FSDP2). fp32 parameters on the host (FSDP2 under CPUOffloadPolicy) are updated in place.
    Every rank of `group` makes it; close it, or use it as a context.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: OffloadConfig,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if config.params or config.grads:
            raise InvalidArgument(
                "StateOffload moves optimizer state only",
                hint="set offload.params and offload.grads to false, or use PagedDataParallel",
            )
        self._group = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
        names = {id(param): name for name, param in model.named_parameters()}
        held = [param for entry in optimizer.param_groups for param in entry["params"]]
        device = local_of(held[0]).device
        self._ledger = Ledger("device memory", int(config.gpu_memory_budget_gb * GB), setting="gpu_memory_budget_gb")
        with fail_together("offload the optimizer", self._group):
            require_adam(optimizer)
            self._store = make_store(config, device)
            try:
                targets = self._place([(names.get(id(param), "a parameter"), param) for param in held], config)
            except BaseException:
                self._store.close()
                raise
        self._mover = CudaMover(device) if device.type == "cuda" else HostMover()
        self._ladder = PressureLadder(POLICIES[config.auto_memory_management], store=self._store, pager=None)
        self.optimizer = OffloadedOptimizer(optimizer, targets, store=self._store, mover=self._mover)
        self.optimizer.after_step = self._ladder.relieve
        self.optimizer.owner = self

    def stats(self) -> OffloadStats:
        """What happened so far, measured. Nothing is fetched ahead here, so there are no hits and misses."""
        traffic, disk = self._store.traffic, self._store.disk
        return OffloadStats(
            num_hits=0,
            num_misses=0,
            num_evictions=0,
            stall_s=self._mover.stall_s,
            update_s=self.optimizer.update_s,
            prefetch_distance=0,
            host_to_device_bytes=traffic.host_to_device_bytes,
            device_to_host_bytes=traffic.device_to_host_bytes,
            disk_read_bytes=traffic.disk_read_bytes,
            disk_written_bytes=traffic.disk_written_bytes,
            stored_bytes=self._store.stored_bytes,
            raw_bytes=self._store.raw_bytes,
            device=TierUse.of(self._ledger),
            host=TierUse.of(self._store.host.ledger),
            disk=None if disk is None else TierUse.of(disk.ledger),
        )

    def close(self) -> None:
        """Free the store; the optimizer is of no use then."""
        self._mover.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _place(self, params: list[tuple[str, nn.Parameter]], config: OffloadConfig) -> list[ParamTarget]:
        form = FORMS[config.cpu_compression]
        trained = [(name, param) for name, param in params if param.requires_grad]
        left = config.device_optimizer_ratio * sum(local_of(param).numel() for _, param in trained)
        targets, everything = [], []
        for name, param in trained:
            flat = flat_of(param)
            pieces = [Piece(low, high) for low, high in cut(0, flat.numel(), max_numel(form))]
            left -= flat.numel()
            stays = left >= 0
            if stays:
                self._ledger.charge((8 if flat.dtype == torch.float32 else 12) * flat.numel(), f"the state of {name}")
            for piece in pieces:
                part = flat[piece.start : piece.stop]
                if (stays and flat.dtype == torch.float32) or (is_updatable_in_place(flat) and form.is_exact):
                    piece.master = part
                elif stays:
                    piece.master = part.float()
                else:
                    piece.master = self._store.add(f"master values of {name}", piece.numel, role="param", form=form)
                    write(self._store, piece.master, part.to("cpu", torch.float32))
            place_state(name, pieces, form, self._store, device=flat.device if stays else None)
            targets.append(ParamTarget(name, param, pieces, is_in_place=flat.dtype == torch.float32))
            everything += pieces
        self._store.host.ledger.charge(workspace_bytes(everything), "room to decode pieces in")
        return targets
