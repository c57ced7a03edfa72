"""Keeps FSDP2's shards in host memory and on disk: it gathers from there, and its gradients end there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed import events
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.mesh.mesh_reduction import clip_to_norm
from torsh_distributed.parallel.offload.budget import GB, make_storage, require_room_in_storage, workspace_bytes
from torsh_distributed.parallel.offload.layer_times import LayerClock
from torsh_distributed.parallel.offload.offload_stats import OffloadStats, PagerCounters
from torsh_distributed.parallel.offload.paging.pager import Forecast
from torsh_distributed.parallel.offload.paging.pressure import POLICIES, PressureRelief
from torsh_distributed.parallel.offload.shards.shard_budget import (
    PiecePlace,
    kept_bytes,
    pieces_ahead,
    pieces_with_device_state,
    place_pieces,
    stored_shard_bytes,
)
from torsh_distributed.parallel.offload.shards.shard_target import StoredShard
from torsh_distributed.parallel.offload.storage.forms import FORMS, plain_form
from torsh_distributed.parallel.offload.storage.mover import mover_for
from torsh_distributed.parallel.offload.storage.tiered_storage import TieredStorage
from torsh_distributed.parallel.offload.storage.tiers import MemoryBudget
from torsh_distributed.parallel.offload.update.optimizer import OffloadedOptimizer, require_adam
from torsh_distributed.parallel.offload.update.param_state import place_param_state
from torsh_distributed.parallel.sharded.shard_keeper import PieceShape, ShardKeeper, is_held, shards_of
from torsh_distributed.parallel.sharded.shared_shards import FixedShards
from torsh_distributed.parallel.torch_internals import FSDPParam
from torsh_distributed.plan.sections.offload import OffloadConfig

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _KeptPiece:
    """One piece: its module, and its shards in storage."""

    shape: PieceShape
    index: int
    module: nn.Module
    shards: dict[nn.Parameter, StoredShard] = field(default_factory=dict)
    is_asked_for: bool = False
    """Whether its shards on disk are being read ahead."""

    @property
    def is_on_disk(self) -> bool:
        return any(shard.is_on_disk for shard in self.shards.values())


class OffloadedShards(ShardKeeper):
    """Shards, gradients and optimizer state of one model within the budgets of a plan's `offload` section.

    A piece's shards are as a whole in host memory or in a mapped file, and so are its gradients. FSDP2 gathers from
    them, on a GPU through its CPUOffloadPolicy; shards in a file are read ahead in the order of the last step. Train
    with the optimizer that `offload_optimizer` returns.
    """

    def __init__(self, config: OffloadConfig, *, device: torch.device, group: dist.ProcessGroup) -> None:
        self._config = config
        self._device = device
        self._group = group
        self._form = FORMS[config.cpu_compression]
        self._budget = MemoryBudget(
            "device memory", int(config.gpu_memory_budget_gb * GB), setting="gpu_memory_budget_gb"
        )
        self._shapes: dict[str, PieceShape] = {}
        self._pieces: dict[str, _KeptPiece] = {}
        self._places: dict[str, PiecePlace] = {}
        self._counters = PagerCounters()
        self._optimizer: OffloadedOptimizer | None = None
        self._storage: TieredStorage
        self._forecast: Forecast
        self._clock: LayerClock
        self._kept_bytes = 0

    # --- building -----------------------------------------------------------------------------------------------

    @override
    def expect(self, pieces: Sequence[PieceShape], *, keeps_gathered: bool, gathered_ahead: int) -> int:
        self._shapes = {piece.name: piece for piece in pieces}
        with fail_together("offload the shards", self._group):
            for param in (param for piece in pieces for param in piece.params):
                if param.dtype not in _DTYPES:
                    raise InvalidArgument(
                        f"the parameter {param.name} is {param.dtype}",
                        hint="offload supports float32, bfloat16 and float16 parameters",
                    )
            stays = pieces_with_device_state(pieces, self._config.device_optimizer_ratio)
            stored = [piece for piece in pieces if piece.name not in stays]
            self._kept_bytes = sum(kept_bytes(piece) for piece in pieces if piece.name in stays)
            ahead = pieces_ahead(
                pieces,
                self._budget,
                fixed_bytes=self._kept_bytes,
                keeps_gathered=keeps_gathered,
                wanted=gathered_ahead,
            )
            require_room_in_storage(partial(stored_shard_bytes, stored), self._config)
            self._storage = make_storage(self._config, self._device)
        host = self._storage.host.budget
        self._places = place_pieces(stored, host.limit_bytes, has_disk=self._storage.disk is not None)
        self._budget.charge(self._kept_bytes, "the shards that stay on the device")
        self._forecast = Forecast(_guess(len(pieces)), max_distance=self._config.prefetch_buffer_size)
        self._report(ahead, gathered_ahead)
        return ahead

    @override
    def policy(self, piece: str) -> OffloadPolicy:
        if self._device.type == "cpu" or piece not in self._places:
            return OffloadPolicy()
        place = self._places[piece]
        # FSDP2 would pin what is in a file, by copying it to memory.
        is_in_file = place.are_params_on_disk or place.are_grads_on_disk
        return CPUOffloadPolicy(pin_memory=self._config.pin_cpu_memory and not is_in_file)

    @override
    def place(self, piece: str, module: nn.Module, *, has_values: bool) -> None:
        shape = self._shapes[piece]
        kept = self._pieces[piece] = _KeptPiece(shape, list(self._shapes).index(piece), module)
        if piece not in self._places:
            return
        tier = self._storage.disk if self._places[piece].are_params_on_disk else self._storage.host
        names = {id(param): name for name, param in module.named_parameters()}
        for one in shards_of(module):
            param = one.sharded_param
            name = ".".join(part for part in (piece, names[id(param)]) if part)
            array = self._storage.add(
                f"shard of {name}",
                one.padded_sharded_param_size.numel(),
                role="param",
                form=plain_form(param.dtype),
                is_copied=True,
                fixed_in=tier,
            )
            flat = array.view()
            assert flat is not None, "shards are stored as plain numbers"
            if has_values:
                flat.copy_(one._sharded_param_data)
                array.allocation.drop_pages()
            _set_shard(one, flat)
            kept.shards[param] = StoredShard(name, array, self._storage)

    @override
    def begin(self, model: nn.Module) -> None:
        with fail_together("keep room for gradients of shards", self._group):
            for name, place in self._places.items():
                self._keep_grads(self._pieces[name], on_disk=place.are_grads_on_disk)
        stored = {param for piece in self._pieces.values() for param in piece.shards}
        fixed = []
        for path, param in model.named_parameters():
            if param in stored:
                owner, _, name = path.rpartition(".")
                assert isinstance(param, DTensor), "a shard"
                fixed.append((model.get_submodule(owner), name, param._local_tensor))
        model.register_forward_pre_hook(FixedShards(fixed).bring_back, prepend=True)  # before FSDP2 gathers
        self._clock = LayerClock({name: self._pieces[name].module for name in self._shapes}, self._device)

    def offload_optimizer(self, optimizer: Optimizer) -> OffloadedOptimizer:
        """The optimizer to train with: that of `optimizer`, with its state in storage; every rank calls this."""
        shards = {id(param): shard for piece in self._pieces.values() for param, shard in piece.shards.items()}
        stays = {
            id(one.sharded_param)
            for name, piece in self._pieces.items()
            if name not in self._places
            for one in shards_of(piece.module)
        }
        with fail_together("offload the optimizer", self._group):
            require_adam(optimizer)
            targets = []
            for number, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
                if param.requires_grad:
                    shard = shards.get(id(param))
                    name = f"parameter {number} of the optimizer" if shard is None else shard.name
                    is_kept = id(param) in stays
                    targets.append(
                        place_param_state(name, param, self._storage, self._form, stays=is_kept, shard=shard)
                    )
            everything = [piece for target in targets for piece in target.pieces]
            self._storage.host.budget.charge(workspace_bytes(everything), "room to decode pieces in")
        self._mover = mover_for(self._device)
        self._relief = PressureRelief(POLICIES[self._config.auto_memory_management], storage=self._storage, pager=None)
        self._optimizer = OffloadedOptimizer(optimizer, targets, storage=self._storage, mover=self._mover)
        self._optimizer.after_step = self._after_step
        return self._optimizer

    # --- training -----------------------------------------------------------------------------------------------

    @override
    def note_gather(self, piece: str) -> None:
        kept = self._pieces[piece]
        self._note_device_use(kept.shape.gathered_bytes, f"the parameters of {piece or 'the model itself'}", piece)
        is_hit = kept.is_asked_for or not kept.is_on_disk
        self._forecast.note(kept.index, is_hit=is_hit)
        self._counters.num_hits += is_hit
        self._counters.num_misses += not is_hit
        kept.is_asked_for = False
        for shard in kept.shards.values():
            shard.note_read()
            self._storage.traffic.host_to_device_bytes += shard.num_bytes
        self._read_ahead()

    @override
    def note_reduction(self, piece: str) -> None:
        shape = self._pieces[piece].shape
        self._note_device_use(shape.grad_bytes, f"the gradients of {piece or 'the model itself'}", None)
        if piece in self._places:
            trained = [param for param in shape.params if param.is_trained]
            size = sum(param.shard_numel * param.dtype.itemsize for param in trained)
            self._storage.traffic.device_to_host_bytes += size

    @override
    def clip(self, grads: Sequence[Tensor], norm: Tensor, max_norm: float | None) -> None:
        for shard in (shard for piece in self._pieces.values() for shard in piece.shards.values()):
            shard.drop_grad_pages()
        if self._optimizer is None:
            clip_to_norm(grads, norm, max_norm)
        elif max_norm is not None:
            factor = float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
            if factor < 1:
                # Gradients in a file are not read and written once more.
                self._optimizer.multiply_grads(factor)

    def stats(self) -> OffloadStats:
        """Measured statistics so far."""
        layers = self._clock.times()
        return OffloadStats.measure(
            self._storage,
            self._budget,
            update_s=0.0 if self._optimizer is None else self._optimizer.update_s,
            stall_s=sum(layer.wait_s for layer in layers),
            counters=self._counters,
            prefetch_distance=self._forecast.distance,
            layers=layers,
        )

    def close(self) -> None:
        """Give the parameters ordinary host memory, and free storage; the optimizer is unusable then."""
        if not self._pieces:
            return
        self._clock.remove()
        for one in (one for piece in self._pieces.values() for one in shards_of(piece.module)):
            _set_shard(one, one._sharded_param_data.clone())
            one.sharded_param.grad = None
        self._pieces.clear()
        if self._optimizer is not None:
            self._mover.close()
        self._storage.close()

    def _keep_grads(self, piece: _KeptPiece, *, on_disk: bool) -> None:
        """Charge what FSDP2 leaves in host memory; in a file, reserve places and have gradients moved there."""
        trained = [(param, shard) for param, shard in piece.shards.items() if param.requires_grad]
        if not on_disk:
            size = sum(shard.num_bytes for _, shard in trained)
            self._storage.host.budget.charge(size, f"the gradients of {piece.shape.name or 'the model itself'}")
            return
        for param, shard in trained:
            shard.grad = self._storage.add(
                f"gradient of {shard.name}",
                shard.array.numel,
                role="param",
                form=shard.array.form,
                fixed_in=self._storage.disk,
            )
            param.register_post_accumulate_grad_hook(shard.keep_grad)  # type: ignore[no-untyped-call]  # torch's

    def _note_device_use(self, num_bytes: int, what: str, piece: str | None) -> None:
        """Count what is on the device now: what stays there, pieces that are gathered, and `num_bytes` for `what`."""
        held = sum(
            kept.shape.gathered_bytes for name, kept in self._pieces.items() if name != piece and is_held(kept.module)
        )
        self._budget.refund(self._budget.used_bytes)
        self._budget.charge(self._kept_bytes + held, "the pieces that are gathered")
        self._budget.charge(num_bytes, what)

    def _read_ahead(self) -> None:
        pieces = list(self._pieces.values())
        by_index = {piece.index: piece for piece in pieces}
        for index in self._forecast.upcoming():
            piece = by_index[index]
            if piece.is_on_disk and not piece.is_asked_for:
                piece.is_asked_for = True
                for shard in piece.shards.values():
                    shard.prefetch()

    def _after_step(self) -> None:
        self._relief.relieve()
        self._forecast.end_step()
        self._read_ahead()

    def _report(self, ahead: int, wanted: int) -> None:
        on_disk = [name or "the model itself" for name, place in self._places.items() if place.are_params_on_disk]
        grads = [name or "the model itself" for name, place in self._places.items() if place.are_grads_on_disk]
        limit = self._storage.host.budget.limit_bytes
        if on_disk or grads:
            reason = f"{len(on_disk)} pieces and gradients of {len(grads)} do not fit in {limit} bytes of host memory"
            events.emit(events.DecisionEvent(subject="offload tier", choice="disk", reason=reason))
        if ahead < wanted:
            reason = f"more pieces at once do not fit in {self._budget.limit_bytes} bytes of device memory"
            events.emit(events.DecisionEvent(subject="pieces gathered ahead", choice=str(ahead), reason=reason))


def _set_shard(one: FSDPParam, flat: Tensor) -> None:
    """Give a parameter the padded shard `flat`; what FSDP2 gathers and what the optimizer sees are parts of it."""
    param = one.sharded_param
    assert isinstance(param, DTensor), "FSDP2 makes no others"
    rows = param.to_local().shape[0]
    one._sharded_param_data = flat
    param._local_tensor = flat.view(one.padded_sharded_param_size).narrow(0, 0, rows)


def _guess(num_pieces: int) -> list[int]:
    """The assumed order of gathers in the first step: the model itself, its pieces, and those back."""
    return [*range(num_pieces), *range(num_pieces - 1, 0, -1)]


def shard_keeper(config: OffloadConfig, device: torch.device) -> OffloadedShards:
    """The keeper of a plan's shards; every rank calls this."""
    assert dist.group.WORLD is not None, "sharding needs ranks"
    return OffloadedShards(config, device=device, group=dist.group.WORLD)
