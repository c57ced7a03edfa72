"""torch's DistributedDataParallel with compression, measurements, checks and a manual mode."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from torsh_distributed.comm.agreement import require_same
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.reduce_op import ReduceOp
from torsh_distributed.compress.compressor import GradientCompressor
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.parallel.data.bucket_clock import OverlapStats, auto_bucket
from torsh_distributed.parallel.data.bucket_reduction import bucket_reducer
from torsh_distributed.parallel.data.gradient_sync import (
    BucketInfo,
    BucketOutcomes,
    GradientHook,
    GradientSync,
    average_bucket,
    gradients_held,
)
from torsh_distributed.parallel.data.replicated_params import GradientDifference, gradient_differences
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.parallel.strategy import check_one_device
from torsh_distributed.plan import CompressConfig, DdpConfig
from torsh_distributed.plan.sections.distributed import DistributedConfig

# torch 2.13 renames the argument; 2.11 knows only the old name. Drop with support for torch < 2.13.
_NEW_NAME = "forward_sync_buffers"
_BUFFERS = _NEW_NAME if _NEW_NAME in inspect.signature(TorchDDP.__init__).parameters else "broadcast_buffers"
_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_UNUSED_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")

ReduceDtype = Literal["same", "fp32", "bf16", "fp16"]
REDUCE_DTYPES = {"same": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Compression = CompressConfig | GradientCompressor | str | None
"""Settings, a method such as "powersgd:4", an existing compressor, or nothing."""


@dataclass(frozen=True, kw_only=True)
class GradientSyncStats:
    """The gradients of this rank, and how they are sent."""

    num_parameters: int
    num_with_gradient: int
    gradient_size_mb: float
    num_buckets: int
    world_size: int
    compression: Mapping[str, float | int | None] | None
    """`CompressionStats` as a dict; None without compression."""


class DistributedDataParallel(TorchDDP):
    """Replicas kept equal by averaging gradients in buckets while backward still computes.

    Everything of torch's class works as there: `no_sync`, `join`, `static_graph`, and so on. Gradients are summed as
    `distributed` says (algorithm, order, rate), in `reduce_dtype`, or sent through `compression`. Every rank constructs
    it with the same settings, or all get a ConfigurationError that names two ranks that differ. Parameters and buffers
    become those of the group's first rank. `device_ids` and `output_device` are torch's: the GPU of the module, which
    is the default, and nothing for a module on the CPU.

    Backward averages. To do it by hand, run backward in `no_sync()` and call `sync_gradients()` when gradients are
    complete.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket: DdpConfig | None = None,
        *,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        compression: Compression = None,
        distributed: DistributedConfig | None = None,
        reduce_dtype: ReduceDtype = "same",
        seed: int = 0,
    ) -> None:
        chosen_group = resolve_group(group)
        config, transport = bucket or DdpConfig(), distributed or DistributedConfig()
        compressor = _compressor(compression, seed)
        device = check_one_device(module)
        _agree(config, compressor, reduce_dtype, chosen_group)
        if compressor is not None:
            refuse_what_cannot_be_compressed(module, reduce_dtype)
        if config.auto_size:
            config = auto_bucket(config, group=chosen_group, device=device)
        is_mean = can_divide_last(module, device, reduce_dtype)
        op = ReduceOp.MEAN if is_mean else ReduceOp.SUM
        reduce = bucket_reducer(transport, chosen_group, device, op=op)
        # One rank has nothing to average; without buckets its gradients exist once, and only until they are cleared.
        self._has_buckets = chosen_group.size() > 1 or compressor is not None
        super().__init__(
            module,
            device_ids=_own_device(device_ids, device),
            output_device=output_device,
            process_group=chosen_group,
            # torch takes the sizes of the first bucket to fill and of all others as a list of limits.
            bucket_cap_mb_list=[config.min_bucket_size_mb, config.max_bucket_size_mb],  # type: ignore[list-item]  # torch takes fractions
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph and self._has_buckets,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            **{_BUFFERS: config.broadcast_buffers},  # type: ignore[arg-type]  # mypy cannot see which name it is
        )
        self._settings = config
        self._searches_loss = False
        self.num_buffer_syncs = 0
        """How often forward has begun to broadcast the buffers: once a step, if there are any."""
        self._reduce_dtype = reduce_dtype
        self._settle_trained()
        self._gradient_sync = GradientSync(
            {id(param): name for name, param in self._trained.items()},
            chosen_group,
            reduce,
            is_mean=is_mean,
            device=device,
            dtype=REDUCE_DTYPES[reduce_dtype],
            overlap=config.overlap,
            is_bucketed=config.bucketing,
        )
        self._can_keep = transport.algorithm == "backend" and not (transport.deterministic or transport.rate_limit_gbps)
        self._gradient_sync.compress_with(compressor)
        self._gradient_sync.share_buckets(device.type == "cpu" and transport.algorithm in ("backend", "auto"))
        if self._has_buckets:
            self.register_comm_hook(self._gradient_sync, average_bucket)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise FeatureNotAvailable(
            "DistributedDataParallel cannot be copied: it holds connections and buckets, which other ranks share",
            hint="copy the model inside it: engine.unwrapped, or `.module` of a model that you wrapped",
            feature="copy.deepcopy",
        )

    @override
    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        """torch builds its reducer and the buckets here."""
        if self._has_buckets:
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch

    def _settle_trained(self) -> None:
        """Note which parameters are trained: buckets are built for them, and a later change is seen by it."""
        named = [(name, one) for name, one in self.module.named_parameters() if name not in self.parameters_to_ignore]
        self._was_trained = [(param, param.requires_grad) for _, param in named]
        self._trained = {plain_name(name): param for name, param in named if param.requires_grad}

    def _follow_trained(self) -> None:
        """Build the buckets again after `requires_grad` was changed: torch's would leave new gradients unaveraged."""
        if self.compressor is not None:
            raise FeatureNotAvailable(
                "requires_grad of parameters was changed, and what compression carries over belongs to the buckets",
                hint="freeze and unfreeze before the model is wrapped, or train without compression",
                feature="requires_grad under compression",
            )
        self._settle_trained()
        self._gradient_sync.rename({id(param): name for name, param in self._trained.items()})
        self._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # untyped in torch
        self.find_unused_parameters = self._settings.find_unused_parameters
        self._build_buckets()
        self.find_unused_parameters = self.find_unused_parameters and not self._searches_loss

    def _need_buckets(self) -> None:
        """Build the buckets that a world of one does without, for features that need them; between steps."""
        if not self._has_buckets:
            self._has_buckets = True
            self._build_buckets()

    def _build_buckets(self) -> None:
        params, expect_sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]  # untyped in torch
        names = self._build_debug_param_to_name_mapping(params)  # type: ignore[no-untyped-call]  # untyped in torch
        self._ddp_init_helper(params, expect_sparse, names, self._settings.static_graph)
        if self._settings.static_graph:
            self._set_static_graph()  # type: ignore[no-untyped-call]  # untyped in torch
        self.register_comm_hook(self._gradient_sync, average_bucket)

    # --- settings ---------------------------------------------------------------------------------------------

    @property
    def bucket_config(self) -> DdpConfig:
        """How gradients are packed, with the measured sizes under `auto_size`."""
        return self._settings

    @property
    def compressor(self) -> GradientCompressor | None:
        """What compresses gradients; None without compression."""
        return self._gradient_sync.compressor

    def with_compression(self, compression: Compression) -> Self:
        """Compress from the next step on, or stop, with None; every rank calls this between steps."""
        compressor = _compressor(compression, 0)
        if compressor is not None:
            refuse_what_cannot_be_compressed(self.module, self._reduce_dtype)
            self._need_buckets()
        self._gradient_sync.compress_with(compressor)
        return self

    @property
    def bucketing_enabled(self) -> bool:
        """Whether gradients are sent in buckets; off sends each by itself, to find out which one causes a problem.

        May be changed between steps, equally on every rank. A compressor packs gradients either way.
        """
        return self._gradient_sync.is_bucketed

    @bucketing_enabled.setter
    def bucketing_enabled(self, is_enabled: bool) -> None:
        self._gradient_sync.is_bucketed = is_enabled

    def register_gradient_hook(self, hook: GradientHook) -> RemovableHandle:
        """Call `hook(name, gradient)` on each gradient of this rank just before it is averaged.

        What it returns, unless None, is averaged instead: for clipping or noise on each rank.
        """
        self._need_buckets()
        return self._gradient_sync.add_hook(hook)

    def retire(self) -> None:
        """Let go of the module's parameters: another wrapper takes them over."""
        if self._has_buckets:
            self._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # untyped in torch

    def adopt_hooks(self, other: DistributedDataParallel) -> None:
        """Take over the gradient hooks of a wrapper that was retired."""
        if other._gradient_sync.num_hooks:
            self._need_buckets()
            self._gradient_sync.adopt_hooks(other._gradient_sync)

    # --- training ---------------------------------------------------------------------------------------------

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._has_buckets:
            return self._forward_alone(inputs, kwargs)
        if torch.is_grad_enabled() and any(param.requires_grad is not was for param, was in self._was_trained):
            self._follow_trained()
        if torch.is_grad_enabled() and not self.require_backward_grad_sync:
            self._gradient_sync.has_pending = True
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch
        except RuntimeError as error:
            if not str(error).startswith(_UNFINISHED):
                raise
            raise self._unused_error(str(error)) from error

    @override
    def _sync_buffers(self) -> None:
        self.num_buffer_syncs += 1
        super()._sync_buffers()  # type: ignore[no-untyped-call]  # untyped in torch

    def _forward_alone(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, with inputs on its device as under torch's."""
        if self.device_ids:
            moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])  # type: ignore[no-untyped-call]  # untyped in torch
            inputs, kwargs = moved[0], moved_kwargs[0]
        return self.module(*inputs, **kwargs)

    def _unused_error(self, text: str) -> InvalidArgument:
        found = _UNUSED_INDICES.search(text)
        names = list(self._trained)
        unused = [names[int(index)] for index in found[1].split()] if found else self.unused_parameters()
        return InvalidArgument(
            f"parameters got no gradient in the last backward: {', '.join(unused)}",
            hint="set ddp.find_unused_parameters, or freeze what forward does not use; gradients were not averaged",
            unused=unused,
        )

    def keep_failed_gradients(self) -> None:
        """From now on, leave gradients whose average fails as they are, where what sums them can tell that it did."""
        self._gradient_sync.keeps_failed = self._can_keep

    def bucket_outcomes(self) -> BucketOutcomes | None:
        """After a backward that raised: which buckets are averaged; None unless all others are this rank's own."""
        return self._gradient_sync.bucket_outcomes() if self._has_buckets else None

    def search_unused(self, loss: Tensor) -> None:
        """Just before each backward from `loss`, where parameters may get no gradient; every rank calls this.

        torch searches from the outputs of forward, under `find_unused_parameters`: what the loss itself uses would
        seem unused. The first call builds the buckets again.
        """
        if not self._settings.find_unused_parameters:
            self._settings = self._settings.replace(find_unused_parameters=True)
            self._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # untyped in torch
            self.find_unused_parameters = True
            self._build_buckets()
            self.find_unused_parameters = False  # for torch's forward
            self._searches_loss = True
        if self._searches_loss and self.require_backward_grad_sync:
            self.reducer.prepare_for_backward([loss])

    def expect_average(self) -> None:
        """Just before a backward: `lacks_average` then speaks of this one."""
        self._gradient_sync.is_sent = not (self._has_buckets and self.require_backward_grad_sync)

    @property
    def lacks_average(self) -> bool:
        """After a backward: whether buckets stayed behind, because a parameter in them got no gradient."""
        return not self._gradient_sync.is_sent

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The parameters whose gradients are averaged, by name."""
        return self._trained

    def average_now(self, gradients: Mapping[str, Tensor]) -> None:
        """Average these in place; every rank gives the same names in the same order."""
        self._gradient_sync.sync_now(gradients, max_bytes=int(self._settings.max_bucket_size_mb * 2**20))

    def averaged_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged, and which are therefore equal on all ranks."""
        return list(self._trained.values())

    def has_gradients(self) -> bool:
        """Whether any parameter holds a gradient."""
        return any(param.grad is not None for param in self._trained.values())

    def unused_parameters(self) -> list[str]:
        """Parameters without a gradient from the last backward: on all ranks under `find_unused_parameters`, else on
        this rank."""
        used: Tensor | None = self.reducer._get_local_used_map() if self._has_buckets else None
        if used is not None:
            return [name for name, is_used in zip(self._trained, used.tolist(), strict=True) if not is_used]
        return [name for name, param in self._trained.items() if param.grad is None]

    @torch.no_grad()
    def sync_gradients(self) -> None:
        """Average the gradients that backward left under `no_sync()`; every rank calls this.

        Does nothing if backward has averaged them already. A parameter with a gradient on some ranks only counts as
        zero on the others; one without a gradient on any rank keeps none. A sparse gradient on any rank raises on all
        of them, before anything is averaged.
        """
        if not self._gradient_sync.has_pending:
            return
        gradients = gradients_held(self._trained, self.process_group)
        self.average_now(gradients)
        self.require_forward_param_sync = True  # as after a backward that averaged: the next forward broadcasts buffers

    @override
    def _match_all_reduce_for_bwd_pass(self) -> None:
        """In `join`: take part in the averages of ranks that still have data; raise what failed."""
        super()._match_all_reduce_for_bwd_pass()  # type: ignore[no-untyped-call]  # untyped in torch
        self._gradient_sync.end_backward()

    @override
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """As in torch: ranks that run out of data take part with zeros until all have. Means are over all ranks."""
        if not divide_by_initial_world_size:
            raise InvalidArgument(
                "join(divide_by_initial_world_size=False) is not possible: means are over all ranks of the group",
                hint="scale the loss of the ranks that still have data, or leave the argument out",
            )
        return super().join(True, enable, throw_on_early_termination)

    @override
    def join_hook(self, **kwargs: Any) -> Any:
        """As in torch, which calls it on every rank when `join` begins."""
        self._need_buckets()
        self._gradient_sync.share_buckets(False)  # a rank out of data brings other buckets
        return super().join_hook(**kwargs)  # type: ignore[no-untyped-call]  # untyped in torch

    # --- figures and checks -----------------------------------------------------------------------------------

    def sync_stats(self) -> GradientSyncStats:
        """Counts and sizes of this rank's gradients, as they are now."""
        held = [param.grad for param in self._trained.values() if param.grad is not None]
        compressor = self.compressor
        return GradientSyncStats(
            num_parameters=len(self._trained),
            num_with_gradient=len(held),
            gradient_size_mb=sum(grad.numel() * grad.element_size() for grad in held) / 2**20,
            num_buckets=len(self._gradient_sync.bucket_info()),
            world_size=dist.get_world_size(self.process_group),
            compression=None if compressor is None else compressor.stats.to_dict(),
        )

    def bucket_info(self) -> list[BucketInfo]:
        """The buckets of the last backward, in the order they travelled; empty before the first."""
        return self._gradient_sync.bucket_info()

    def overlap_stats(self) -> OverlapStats | None:
        """How much communication overlapped with backward; None on a GPU, where the host's clock cannot tell."""
        return self._gradient_sync.clock.overlap() if self.device.type == "cpu" else None

    def take_comm_s(self) -> float | None:
        """Seconds spent sending gradients since the last call; None on a GPU."""
        seconds = self._gradient_sync.clock.take_s()
        return seconds if self.device.type == "cpu" else None

    def check_gradient_consistency(self) -> list[GradientDifference]:
        """Parameters whose gradients are not bit-identical on all ranks, with the ranks that differ; empty if none.

        Every rank calls this, after backward and before the optimizer's step, and gets the same answer.
        """
        return gradient_differences({name: param.grad for name, param in self._trained.items()}, self.process_group)


def _compressor(compression: Compression, seed: int) -> GradientCompressor | None:
    if compression is None or isinstance(compression, GradientCompressor):
        return compression
    config = compression if isinstance(compression, CompressConfig) else CompressConfig(method=compression)
    return None if config.name == "none" else GradientCompressor(config, seed=seed)


def _agree(
    config: DdpConfig, compressor: GradientCompressor | None, reduce_dtype: str, group: dist.ProcessGroup
) -> None:
    """Raise on all ranks if settings differ: the ranks would wait for each other."""
    mine = {
        "ddp": config.model_dump(mode="json"),
        "compress": None if compressor is None else compressor.config.model_dump(mode="json"),
        "reduce_dtype": reduce_dtype,
    }
    require_same(mine, group=group)


def _own_device(
    device_ids: Sequence[int | torch.device] | None, device: torch.device
) -> list[int | torch.device] | None:
    """What torch gets as `device_ids`; it refuses them itself for a module on the CPU."""
    if device_ids is None:
        return [device] if device.type == "cuda" else None
    given = list(device_ids)
    if device.type == "cuda" and [torch.device(one) for one in given] not in ([], [device]):
        raise InvalidArgument(
            "device_ids must name the one device that the module is on",
            hint="move the module there first, or leave device_ids out",
            device_ids=[str(one) for one in given],
            module_device=str(device),
        )
    return given


def refuse_what_cannot_be_compressed(module: nn.Module, reduce_dtype: str) -> None:
    """Refuse sparse gradients, and compression together with a `reduce_dtype`."""
    sparse = sparse_modules(module)
    if sparse:
        raise InvalidArgument(
            f"sparse gradients cannot be compressed: {', '.join(sparse)}",
            hint="build these modules with sparse=False, or train without compression",
            modules=sparse,
        )
    if reduce_dtype != "same":
        raise InvalidArgument(
            "reduce_dtype and compression exclude each other: the codec decides the form in which gradients are sent",
            hint='use compression="fp16" or "bf16", or leave precision.reduce_dtype at "same"',
            reduce_dtype=reduce_dtype,
        )


def can_divide_last(module: nn.Module, device: torch.device, reduce_dtype: ReduceDtype) -> bool:
    """Whether gradients may be summed before dividing, which saves a pass where the backend does both at once.

    Not 16-bit floats, whose sum may overflow, and not sparse gradients, which backends can only sum.
    """
    is_wide = reduce_dtype == "fp32" or (
        reduce_dtype == "same" and all(param.dtype.itemsize >= 4 for param in module.parameters())
    )
    return device.type == "cpu" and is_wide and not sparse_modules(module)


def sparse_modules(module: nn.Module) -> list[str]:
    """Names of the embeddings whose gradients are sparse."""
    kinds = nn.Embedding | nn.EmbeddingBag
    return [name for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse]


def refuse_sparse_shards(module: nn.Module) -> None:
    """Sharding reduces and updates pieces of dense gradients."""
    sparse = [name for name in sparse_modules(module) if module.get_submodule(name).weight.requires_grad]
    if sparse:
        raise InvalidArgument(
            f"the gradients of {', '.join(sparse)} are sparse, and sparse gradients cannot be sharded",
            hint="build these modules with sparse=False and use Adam in place of SparseAdam, or use mesh.dp",
            modules=sparse,
        )
