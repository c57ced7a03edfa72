"""Sharded data parallelism on FSDP2: each rank keeps a shard of the model's state and gets a part of each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from typing_extensions import override

from torsh_distributed.comm.groups import process_group
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.compress.compressor_state import stream_of
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.parallel.data.ddp import refuse_sparse_shards
from torsh_distributed.parallel.data.replicated_params import ReplicatedGradients, broadcast_from_first
from torsh_distributed.parallel.mesh.layout import GRADIENT_AXES
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.mesh.mesh_reduction import clip_to_norm, grad_norm, held_by_placement
from torsh_distributed.parallel.models.materialize import Materializer, ParamInit, is_on_meta
from torsh_distributed.parallel.models.same_model import check_same_model
from torsh_distributed.parallel.models.wrapping import WrapFn, ignored_modules, pieces_of
from torsh_distributed.parallel.sharded.communication import CommTally, TalliedAllGather, TalliedReduceScatter
from torsh_distributed.parallel.sharded.compression import (
    CompressedReduceScatter,
    EncodedAllGather,
    ParamShard,
    check_method,
    replica_average,
)
from torsh_distributed.parallel.sharded.copies import explain_copies
from torsh_distributed.parallel.sharded.same_gradients import SameGradients
from torsh_distributed.parallel.sharded.shard_keeper import ShardKeeper, piece_shapes
from torsh_distributed.parallel.sharded.shared_shards import (
    MemoryStats,
    ShardInfo,
    local_part,
    place_shards,
    share_shards,
    storage_bytes,
)
from torsh_distributed.parallel.state import whole_state
from torsh_distributed.parallel.strategy import check_one_device
from torsh_distributed.parallel.torch_internals import _BatchNorm
from torsh_distributed.parallel.weights.model_weights import HeldParts, ModelWeights
from torsh_distributed.plan.sections.compress import CompressConfig
from torsh_distributed.plan.sections.data import FsdpConfig
from torsh_distributed.plan.sections.mesh import MeshConfig
from torsh_distributed.plan.sections.training import PrecisionConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class SeparateShards:
    """Modules whose parameters differ between some replicas, such as spread experts: sharded over other ranks."""

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh
    """The ranks that hold the same parameters: to shard over, or replicas × shards."""
    divisor: int
    """Divides summed gradients: the number of parts of the batch, including those that no rank of `mesh` has."""


class FullyShardedDataParallel(nn.Module):
    """A model whose parameters, gradients and optimizer state are sharded; called like the model itself.

    Every rank of the mesh constructs it with the same model: parameters and buffers become those of the first rank, and
    the model's parameters are replaced by shards (DTensors), so build the optimizer afterwards. A model on the meta
    device gets its weights here, a piece at a time, or from `weights` once it is sharded. `module` is the user's model,
    changed in place.

    `mesh` gives the ranks to shard over (its `shard` axis) and the replicas of that (`dp`, `ep`, `cp`); by default
    `group` or the world is one shard axis. `strategy = "shard_grad_op"` keeps parameters gathered between forward and
    backward. `compression` encodes gradients: over the shard axis, or between replicas if there are any. `attach` the
    optimizer if there is compression, or a parameter that is not sharded. `separate` modules are sharded differently.
    `parts` says which pieces of `weights` the parameters are, in a model that is split already. `keeper` stores the
    shards elsewhere between uses.
    """

    def __init__(
        self,
        module: nn.Module,
        config: FsdpConfig | None = None,
        *,
        mesh: Mesh | None = None,
        group: dist.ProcessGroup | None = None,
        precision: PrecisionConfig | None = None,
        wrap_fn: WrapFn | None = None,
        param_init_fn: ParamInit | None = None,
        weights: ModelWeights | None = None,
        parts: HeldParts | None = None,
        seed: int = 0,
        broadcast_buffers: bool = True,
        compression: CompressConfig | None = None,
        separate: SeparateShards | None = None,
        keeper: ShardKeeper | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config or FsdpConfig()
        _check_strategy(self.config)
        refuse_sparse_shards(module)
        device = process_group.device() if is_on_meta(module) else check_one_device(module)
        self.mesh = mesh or Mesh(MeshConfig(dp=1, shard=-1), device_type=device.type, group=group)
        self.compressor = _compressor(compression, self.mesh, seed)
        torch_mesh = _shard_mesh(self.mesh, has_compressor=self.compressor is not None)
        self._group = self.mesh.group(*GRADIENT_AXES)
        check_same_model(module, self._group)
        materializer = None
        self._weights, self._parts = weights if is_on_meta(module) else None, parts
        if self._weights is not None:
            pass  # read into the shards, once there are some
        elif is_on_meta(module):
            materializer = Materializer(module, device, init_fn=param_init_fn, seed=seed)
        else:
            apart = _ids_of(separate)
            equal = [param for param in module.parameters() if id(param) not in apart]
            broadcast_from_first([*equal, *module.buffers()], self._group)
        self.tally = CommTally()
        self._keeper = keeper
        self._same = SameGradients(self._group)
        replicated = _kept_whole(module, self.config)
        self._shard(torch_mesh, precision or PrecisionConfig(), replicated, materializer, wrap_fn, separate)
        apart = _ids_of(separate)
        self._same.compare(
            {
                name: param
                for name, param in module.named_parameters()
                if isinstance(param, DTensor) and param.requires_grad and id(param) not in apart
            }
        )
        self._replicated = ReplicatedGradients(
            [param for param in module.parameters() if not isinstance(param, DTensor)], self._group
        )
        self._buffers_to_send = _persistent_buffers(module) if broadcast_buffers and self._group.size() > 1 else []
        self._is_syncing = True

    def _shard(
        self,
        mesh: DeviceMesh,
        precision: PrecisionConfig,
        replicated: set[str],
        materializer: Materializer | None,
        wrap_fn: WrapFn | None,
        separate: SeparateShards | None,
    ) -> None:
        """Apply `fully_shard` to every piece, innermost first, then to the model; meta tensors are filled before."""
        done = separate.modules if separate else ()
        pieces = [one for one in pieces_of(self.module, self.config, wrap_fn).values() if one not in done]
        policy = MixedPrecisionPolicy(
            param_dtype=_DTYPES.get(precision.dtype) if precision.dtype != "fp32" else None,
            reduce_dtype=_DTYPES.get(precision.reduce_dtype),
            cast_forward_inputs=precision.cast_forward_inputs,
        )
        # Of the whole model only: FSDP2 would cast what one piece hands to the next, too.
        outermost = replace(policy, output_dtype=_DTYPES.get(precision.output_dtype))
        keeps_gathered = self.config.strategy == "shard_grad_op"
        if separate is not None:
            _shard_separately(separate, policy, keeps_gathered=keeps_gathered)
        names = {module: name for name, module in self.module.named_modules()}
        ahead, keeper = self.config.max_gathered_ahead, self._keeper
        if keeper is not None:
            shapes = piece_shapes(self.module, pieces, replicated, mesh.size(-1), policy.param_dtype)
            ahead = keeper.expect(shapes, keeps_gathered=keeps_gathered, gathered_ahead=ahead)
        for piece in [*reversed(pieces), self.module]:
            if materializer is not None:
                materializer.make(piece)
            whole = {
                param for name, param in self.module.named_parameters(remove_duplicate=False) if name in replicated
            }
            _check_dtypes(self.module, piece, whole)
            fully_shard(
                piece,
                mesh=mesh,
                # None lets FSDP2 keep the model's own piece gathered, because backward begins with it.
                reshard_after_forward=False if keeps_gathered else (None if piece is self.module else True),
                mp_policy=outermost if piece is self.module else policy,
                ignored_params=whole,
                offload_policy=OffloadPolicy() if keeper is None else keeper.policy(names[piece]),
            )
            if keeper is not None and self._weights is None:
                keeper.place(names[piece], piece, has_values=True)
        if self._weights is not None:
            self._weights.allocate(self.module)
            if keeper is not None:
                for piece in [*reversed(pieces), self.module]:
                    keeper.place(names[piece], piece, has_values=False)
        _cast_buffers(self.module, _DTYPES.get(precision.buffer_dtype))
        _check_batch_norms(self.module, policy.param_dtype)
        explain_copies(self.module)
        self._pieces = [piece for piece in pieces if isinstance(piece, FSDPModule)]
        _set_prefetch(self._pieces, self.config, ahead)
        group = mesh.get_group(mesh.ndim - 1)
        self._fill_slots(mesh.size(-1), group)
        # Else it gathers other values, or values from elsewhere.
        can_share = policy.param_dtype is None and self.config.gather_codec == "none" and keeper is None
        if self._weights is not None:
            with (place_shards(self.module, group) if can_share else None) or nullcontext() as memory:
                self._weights.load(self.module, self._parts, memory=memory)
        elif can_share:
            share_shards(self.module, group)
        if keeper is not None:
            keeper.begin(self.module)

    def use_prefetch(self, config: FsdpConfig) -> None:
        """Gather as far ahead as `config` says from the next forward on; every rank calls this between steps."""
        if self._keeper is not None:
            raise FeatureNotAvailable(
                "what offloaded shards gather ahead was counted against their budget before the first step",
                hint="set fsdp.forward_prefetch in the plan before the job starts",
                feature="fsdp.forward_prefetch",
            )
        self.config = config
        _set_ahead(self._pieces, config)

    def _fill_slots(self, num_shards: int, group: dist.ProcessGroup) -> None:
        """Give every piece its all-gather and reduce-scatter: FSDP2's own, counted, or encoded ones."""
        method, compressor = self.config.gather_codec, self.compressor
        has_replicas = self.mesh.layout.degree("dp") > 1
        names = {id(param): name for name, param in whole_state.named_params(self.module).items()}
        for number, (name, piece) in enumerate(self.module.named_modules()):
            inside = dict.fromkeys(_travelling(piece))
            if not isinstance(piece, FSDPModule):
                continue
            param_shards = [
                ParamShard(names[id(param)], (-(-param.shape[0] // num_shards), *param.shape[1:]))
                for param in inside
                if isinstance(param, DTensor) and param.requires_grad
            ]
            gathered, reduced = partial(self._note_gather, name), partial(self._note_reduction, name, number)
            if method == "none":
                piece.set_custom_all_gather(TalliedAllGather(self.tally, group, gathered))
            else:
                piece.set_custom_all_gather(EncodedAllGather(method, stream_of([name]), self.tally, gathered))
            if compressor is not None and not has_replicas:
                scattered = CompressedReduceScatter(name, param_shards, compressor, self.tally, reduced)
                piece.set_custom_reduce_scatter(scattered)
                continue
            piece.set_custom_reduce_scatter(TalliedReduceScatter(self.tally, group, reduced))
            if compressor is not None:
                replicas = self.mesh.group("dp")
                piece.set_all_reduce_hook(replica_average(name, param_shards, compressor, replicas, self.tally))

    def _note_gather(self, piece: str) -> None:
        if self._keeper is not None:
            self._keeper.note_gather(piece)

    def _note_reduction(self, piece: str, number: int) -> None:
        self._same.note_reduction(number)
        if self._keeper is not None:
            self._keeper.note_reduction(piece)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._buffers_to_send and self.training and torch.is_grad_enabled():
            broadcast_from_first(self._buffers_to_send, self._group)
        return self.module(*args, **kwargs)

    def set_gradient_sync(self, is_syncing: bool) -> None:
        """Whether the next backward reduces gradients; if not, they accumulate on each rank, unsharded."""
        if is_syncing != self._is_syncing:
            root = self.module
            assert isinstance(root, FSDPModule)
            root.set_requires_gradient_sync(is_syncing)
            self._is_syncing = is_syncing

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of all microbatches but the last: gradients accumulate and are not sent."""
        self.set_gradient_sync(False)
        try:
            yield
        finally:
            self.set_gradient_sync(True)

    def attach(self, optimizer: Optimizer) -> None:
        """Hook into the optimizer's steps: average unsharded gradients before each, count steps for compression."""
        optimizer.register_step_pre_hook(lambda *_: self._same.check())
        optimizer.register_step_pre_hook(lambda *_: self._replicated.average())
        optimizer.register_step_post_hook(lambda *_: self._replicated.forget())
        if self.compressor is not None:
            compressor = self.compressor
            optimizer.register_step_post_hook(lambda *_: compressor.step())

    def average_replicated(self) -> None:
        """Average the gradients of parameters that are not sharded, unless already done since the last step."""
        self._replicated.average()

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        """Scale gradients to at most this norm over the whole model (None: only measure it); returns the norm."""
        self.average_replicated()
        grads = [param.grad for param in self.module.parameters() if param.grad is not None]
        norm = grad_norm(held_by_placement(grads), torch.device(self.mesh.device_type))
        if self._keeper is None:
            clip_to_norm(grads, norm, max_norm)
        else:
            self._keeper.clip(grads, norm, max_norm)
        return norm

    def reshard(self) -> None:
        """Free what forward left gathered, as after evaluation: the module's parameters are shards again."""
        for piece in self._sharded_modules():
            piece.reshard()

    def num_parameters(self) -> int:
        """Elements of all parameters, over all ranks; shared ones once."""
        return sum(param.numel() for param in self.module.parameters())

    def local_sharding_ratio(self) -> float:
        """The share of all elements that this rank holds."""
        return sum(local_part(param).numel() for param in self.module.parameters()) / max(1, self.num_parameters())

    def shards(self) -> list[ShardInfo]:
        """What this rank owns of every sharded parameter."""
        self.reshard()
        found = []
        for name, param in whole_state.named_params(self.module).items():
            if isinstance(param, DTensor):
                num_ranks, rank = param.device_mesh.size(-1), param.device_mesh.get_local_rank(-1)
                dim = next(one.dim for one in param.placements if isinstance(one, Shard))
                rows = -(-param.shape[dim] // num_ranks)
                start = min(rank * rows, param.shape[dim])
                size = param.to_local().shape[dim]
                found.append(ShardInfo(name=name, dim=dim, start=start, size=size, original_shape=tuple(param.shape)))
        return found

    def memory_stats(self, optimizer: Optimizer | None = None) -> MemoryStats:
        """What this rank holds now, with the state of `optimizer` if one is given."""
        params = list(self.module.parameters())
        state = [] if optimizer is None else [value for one in optimizer.state.values() for value in one.values()]
        return MemoryStats(
            param_bytes=storage_bytes(params),
            grad_bytes=storage_bytes([param.grad for param in params if param.grad is not None]),
            optimizer_bytes=storage_bytes([value for value in state if isinstance(value, Tensor)]),
            buffer_bytes=storage_bytes(list(self.module.buffers())),
            whole_param_bytes=sum(param.numel() * param.element_size() for param in params),
            num_gathers=self.tally.num_gathers,
            num_reductions=self.tally.num_reductions,
            peak_device_bytes=torch.cuda.max_memory_allocated() if self.mesh.device_type == "cuda" else None,
        )

    def full_state_dict(self) -> dict[str, Any]:
        """The model's state with whole tensors, on every rank; all ranks call this."""
        self.reshard()
        return whole_state.model_state(self.module)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's shards of a whole state, saved at any world size; equal on all ranks."""
        self.reshard()
        whole_state.load_model_state(self.module, state)

    def sharded_state_dict(self) -> dict[str, Any]:
        """The model's state as this rank holds it, sharded tensors as DTensors: for torch.distributed.checkpoint."""
        self.reshard()
        return dict(self.module.state_dict())

    def _sharded_modules(self) -> list[FSDPModule]:
        return [module for module in self.module.modules() if isinstance(module, FSDPModule)]


def _ids_of(separate: SeparateShards | None) -> set[int]:
    return {id(param) for one in (separate.modules if separate else ()) for param in one.parameters()}


def _shard_separately(separate: SeparateShards, policy: MixedPrecisionPolicy, *, keeps_gathered: bool) -> None:
    for module in separate.modules:
        made = fully_shard(
            module,
            mesh=separate.mesh,
            reshard_after_forward=not keeps_gathered,
            shard_placement_fn=partial(_evenly, num_shards=separate.mesh.size(-1)),
            mp_policy=policy,
        )
        made.set_gradient_divide_factor(separate.divisor)
        # Not every backend can scale while it reduces.
        made.set_force_sum_reduction_for_comms(True)


def _evenly(param: nn.Parameter, *, num_shards: int) -> Shard:
    """Shard the first dim that divides evenly: the number of experts may not, but their rows do."""
    return Shard(next((dim for dim, size in enumerate(param.shape) if size % num_shards == 0), 0))


def _check_strategy(config: FsdpConfig) -> None:
    elsewhere = {
        "shard_optimizer": "parallelize() with mesh.shard above 1 builds replicas with a sharded optimizer",
        "no_shard": "use DistributedDataParallel, or parallelize() with mesh.shard = 1",
    }
    if config.strategy in elsewhere:
        raise InvalidArgument(
            f"FullyShardedDataParallel shards parameters, which fsdp.strategy {config.strategy!r} does not",
            hint=elsewhere[config.strategy],
        )


def _compressor(config: CompressConfig | None, mesh: Mesh, seed: int) -> GradientCompressor | None:
    """The compressor: between the replicas if there are any, else over the shard axis."""
    if config is None or config.method == "none":
        return None
    axis = "dp" if mesh.layout.degree("dp") > 1 else "shard"
    check_method(config, has_replicas=axis == "dp")
    return GradientCompressor(config, group=mesh.group(axis), seed=seed)


def _shard_mesh(mesh: Mesh, *, has_compressor: bool) -> DeviceMesh:
    """The ranks to shard over, or replicas × shards; without `dp` if a compressor averages over it."""
    layout = mesh.layout
    replicas = tuple(axis for axis in GRADIENT_AXES if axis != "shard")
    if layout.degree(*replicas) > 1 and layout.degree("shard") == 1:
        raise InvalidArgument(
            f"there is nothing to shard over: {layout.config.equation}",
            hint="set mesh.shard to the number of ranks that share the model's state",
        )
    return mesh.grid(tuple(axis for axis in replicas if axis != "dp" or not has_compressor), "shard")


def _kept_whole(model: nn.Module, config: FsdpConfig) -> set[str]:
    """Names of the parameters that every rank keeps whole: ignored ones; scalars and empty ones cannot be sharded."""
    ignored = {id(module) for module in ignored_modules(model, config.ignored_modules).values()}
    inside = {
        id(param) for module in model.modules() if id(module) in ignored for param in module.parameters(recurse=False)
    }
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, param in named if id(param) in inside or param.dim() == 0 or not param.numel()}


def _check_dtypes(model: nn.Module, piece: nn.Module, whole: set[nn.Parameter]) -> None:
    """FSDP2 sends the gradients of a piece as one buffer, so its trained parameters must have one dtype."""
    names = {id(param): name for name, param in model.named_parameters()}
    seen: dict[torch.dtype, str] = {}
    for param in piece.parameters():
        if param.requires_grad and param not in whole and not isinstance(param, DTensor):
            seen.setdefault(param.dtype, names[id(param)])
    if len(seen) > 1:
        (one, first), (two, second), *_ = seen.items()
        raise InvalidArgument(
            f"parameters of one piece have two dtypes: {first} is {one}, {second} is {two}",
            hint="convert the model to one dtype, or make their modules separate pieces (fsdp.wrap_names)",
        )


def _travelling(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a piece in the order in which FSDP2 packs them: inner modules first."""
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _travelling(child)
    yield from module.parameters(recurse=False)


def _set_prefetch(pieces: Sequence[FSDPModule], config: FsdpConfig, ahead: int) -> None:
    """Set what each piece prefetches, in the order of the model. FSDP2's default prefetches one, in backward."""
    for index, piece in enumerate(pieces):
        if config.forward_prefetch and ahead > 0:
            piece.set_modules_to_forward_prefetch(list(pieces[index + 1 : index + 1 + ahead]))
        if config.backward_prefetch != "backward_pre" or ahead == 0:
            # An explicit list turns FSDP2's choice off, and this piece is gathered already.
            piece.set_modules_to_backward_prefetch([piece])
        elif ahead > 1:
            piece.set_modules_to_backward_prefetch(list(pieces[max(0, index - ahead) : index][::-1]) or [piece])


def _set_ahead(pieces: Sequence[FSDPModule], config: FsdpConfig) -> None:
    """Set all of it once more, for pieces that may prefetch otherwise now."""
    for index, piece in enumerate(pieces):
        if not config.forward_prefetch:
            piece.set_modules_to_forward_prefetch([])
        if config.backward_prefetch == "backward_pre":
            ahead = pieces[max(0, index - config.max_gathered_ahead) : index]
            piece.set_modules_to_backward_prefetch(list(ahead[::-1]) or [piece])
    _set_prefetch(pieces, config, config.max_gathered_ahead)


def _persistent_buffers(module: nn.Module) -> list[Tensor]:
    """Buffers that are part of the model's state, such as running means: their replicas must not diverge."""
    kept = module.state_dict(keep_vars=True)
    return [buffer for name, buffer in module.named_buffers() if name in kept]


def _check_batch_norms(module: nn.Module, dtype: torch.dtype | None) -> None:
    """On a CPU torch normalises only with means and weights of one dtype, and raises in the middle of a forward."""
    for name, norm in module.named_modules():
        is_cast = isinstance(norm, _BatchNorm) and isinstance(norm.weight, DTensor)
        mean = norm.running_mean if is_cast else None
        if dtype is not None and isinstance(mean, Tensor) and mean.is_cpu and mean.dtype != dtype:
            short = next(short for short, known in _DTYPES.items() if known == dtype)
            raise InvalidArgument(
                f"the batch norm {name} computes in {short} with running means in {mean.dtype}, which a CPU cannot",
                hint=f'set precision.buffer_dtype = "{short}", or normalise by layer or group',
                module=name,
            )


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    for inner in module.modules():
        for name, buffer in inner.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(inner, name, buffer.to(dtype))
