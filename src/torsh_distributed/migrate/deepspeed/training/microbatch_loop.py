"""Forward and backward of microbatches in a script's own loop: when gradients are reduced, and by how much scaled.

Shards of parameters (stages 2 and 3) reduce gradients in every backward. Replicas (0 and 1) do it once per update:
during the last backward, if the engine knows in forward that it is the last, or else in `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from torsh_distributed import events
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import FeatureNotAvailable, first_line
from torsh_distributed.migrate.deepspeed.deepspeed_errors import require
from torsh_distributed.migrate.deepspeed.training.run_settings import RunSettings
from torsh_distributed.migrate.deepspeed.training.untrained_model import NoOptimizer
from torsh_distributed.migrate.deepspeed.training.update_step import UpdateStep
from torsh_distributed.migrate.deepspeed.zero.local_hooks import LocalHooks
from torsh_distributed.parallel.data.ddp import DistributedDataParallel
from torsh_distributed.parallel.expert.expert_strategy import ExpertDataParallel
from torsh_distributed.parallel.state.whole_state import plain_name
from torsh_distributed.train.engine import Engine


class DeepSpeedDataLoader:
    """This rank's microbatches of a dataset; `len()` is their number.

    Every epoch has the same order, as in DeepSpeed, unless the script calls `data_sampler.set_epoch`.
    """

    def __init__(self, loader: DataLoader[Any], sampler: Sampler[int] | None) -> None:
        self.dataloader, self.data_sampler = loader, sampler
        self.batch_size = loader.batch_size

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataloader)


class RepeatingLoader:
    """Goes over a loader again and again: `next(iter(RepeatingLoader(loader)))` never ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as it should


def batch_loader(
    dataset: Dataset[Any],
    settings: RunSettings,
    place: tuple[int, int],
    *,
    batch_size: int | None = None,
    device: torch.device,
    collate_fn: Callable[..., Any] | None = None,
    data_sampler: Sampler[int] | None = None,
    num_local_io_workers: int | None = None,
    pin_memory: bool | None = None,
    route: str = "train",
    **_: object,
) -> DeepSpeedDataLoader:
    """Microbatches of this rank; `place` is its part of every batch, and how many parts there are.

    Training shuffles, evaluation (`route` "eval" or "predict") does not.
    """
    rank, num_ranks = place
    sampler = data_sampler
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=num_ranks, rank=rank, shuffle=route == "train")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=batch_size or settings.batch.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_local_io_workers or 0,
        pin_memory=device.type == "cuda" if pin_memory is None else pin_memory,
        drop_last=bool(settings.value("dataloader_drop_last", False)),
    )
    return DeepSpeedDataLoader(loader, sampler)


_UNSCALED = (
    "Loss scaling is required for this configuration, but backward() was called directly without scaling the loss."
    " Please use one of the following: 1. engine.backward(loss) 2. engine.scale(loss).backward()"
)


class MicrobatchLoop:
    """Runs the model and its backward for one engine; every rank makes the same calls."""

    def __init__(self, core: Engine, settings: RunSettings, update: UpdateStep) -> None:
        self._core, self._settings, self._update = core, settings, update
        self._replicas = core.model if isinstance(core.model, DistributedDataParallel) else None
        self._experts = core.strategy if isinstance(core.strategy, ExpertDataParallel) else None
        if self._experts is not None:
            self._experts.waits_for_update = True
        self._is_averaged = True
        """Whether gradients of experts are averaged since the last forward; `step` may come after a script did it."""
        self._is_untrained = isinstance(core.optimizer, NoOptimizer)
        self.is_inside_no_sync = False
        self._overlaps: bool | None = None if self._replicas is not None else False
        """Whether the last backward of an update may reduce; None until the first update shows that all parameters
        get gradients."""
        self._num_open = 0
        """Forwards since the last backward: replicas can reduce during backward only if there is one."""
        self._is_in_backward = self._is_scaled_by_hand = False
        self.hooks = LocalHooks(core)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, ends_update: bool | None) -> Any:
        """The model's outputs. `ends_update`: whether backward will end an accumulation; None if it is not known."""
        core = self._core
        if self._is_untrained or not (torch.is_grad_enabled() and core.model.training):
            with self._autocast(), _naming_foreign_shards():
                return core.model(*args, **kwargs)
        self._update.began()
        self._num_open += 1
        self._is_averaged = False
        with events.phase("forward"), self._syncing(bool(ends_update)), self._autocast(), _naming_foreign_shards():
            outputs = core.model(*args, **kwargs)
        self.hooks.attach()
        if self._settings.batch.accumulation > 1 or self._update.scaler.loss_scale != 1.0:
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._scale_plain)  # type: ignore[no-untyped-call]  # untyped in torch
        return outputs

    def backward(self, loss: Tensor, *, retain_graph: bool, scale_wrt_gas: bool, ends_update: bool) -> Tensor:
        """Gradients of the loss, times the loss scale; returns the loss as it counts in the update."""
        require(
            isinstance(loss, Tensor) and loss.dim() == 0,
            "loss must be a scalar tensor. If you need to pass output gradients, backward() of output tensors",
            got=tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__,
        )
        count = self._settings.batch.accumulation
        share = loss / count if scale_wrt_gas and count > 1 else loss
        self._update.add_loss(share, is_last=ends_update)
        scale = self._update.scaler.loss_scale
        scaled = share if scale == 1.0 else share.float() * scale
        self._is_in_backward = True
        try:
            with events.phase("backward"):
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]  # untyped in torch
        finally:
            self._is_in_backward, self._num_open = False, 0
        return share

    def scale(self, loss: Tensor) -> Tensor:
        """The loss for a `backward()` of the script's own."""
        require(
            isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad,
            "loss must be a scalar tensor with grad_fn. For non-scalar tensors, use tensor.backward(grad)",
        )
        self._is_scaled_by_hand = True
        scale = self._update.scaler.loss_scale
        return loss if scale == 1.0 else loss.float() * scale

    def finish_gradients(self) -> None:
        """Before the update: average what backward did not; every rank calls this."""
        self._num_open, self._is_scaled_by_hand = 0, False
        self._refuse_unused()
        replicas = self._replicas
        if replicas is None:
            return
        if self._overlaps is None:
            mine = all(param.grad is not None for param in replicas.averaged_parameters())
            self._overlaps = all(all_gather_object(mine)) if replicas.process_group.size() > 1 else mine
        with events.phase("backward"):
            replicas.sync_gradients()
            if self._experts is not None and not self._is_averaged:
                self._experts.average_experts()
        self._is_averaged = True

    def _refuse_unused(self) -> None:
        """A parameter without a gradient is an error if the config of stage 1 or 2 says so, on all ranks alike."""
        ignores = self._settings.value("zero_optimization.ignore_unused_parameters", True)
        if ignores or self._settings.stage not in (1, 2):
            return
        named = self._core.unwrapped.named_parameters()
        unused = [name for name, param in named if param.requires_grad and param.grad is None]
        everywhere: list[list[str]] = all_gather_object(unused)
        require(
            not any(everywhere),
            "This assert indicates that your module has parameters that were not used in producing loss. You can avoid"
            " it by (1) enable ignore_unused_parameters option in zero_optimization config; (2) making sure all"
            " trainable parameters and `forward` function outputs participate in calculating loss.",
            parameters=sorted({plain_name(name) for names in everywhere for name in names}),
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self._settings.autocast_dtype
        return (
            nullcontext()
            if dtype is None
            else torch.autocast(next(self._core.unwrapped.parameters()).device.type, dtype)
        )

    def _syncing(self, ends_update: bool) -> AbstractContextManager[Any]:
        """Around forward, which is where replicas decide whether its backward reduces."""
        if self._replicas is None:
            return nullcontext()
        may_overlap = bool(self._overlaps) and self._num_open == 1 and not self.is_inside_no_sync
        return nullcontext() if ends_update and may_overlap else self._replicas.no_sync()

    def _scale_plain(self, grad: Tensor) -> Tensor:
        """For `loss.backward()` in a script: what `backward` would have done to the loss."""
        if self._is_in_backward:
            return grad
        if self._update.scaler.loss_scale != 1.0 and not self._is_scaled_by_hand:
            raise RuntimeError(_UNSCALED)
        return grad / self._settings.batch.accumulation


@contextmanager
def _naming_foreign_shards() -> Iterator[None]:
    """Around a forward: a parameter of stage 3 that another module uses is a shard there, and torch names only that."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise FeatureNotAvailable(
            "a module's forward used a parameter of another module, of which this rank has a shard under ZeRO stage 3",
            hint="say so before deepspeed.initialize: deepspeed.zero.register_external_parameter(module, parameter), or"
            " deepspeed.utils.set_z3_leaf_modules(model, [the class of the module that uses it])",
            reason=first_line(error),
        ) from error


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """The tensors in a model's outputs, which may be records of Hugging Face."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        for value in outputs:
            yield from _tensors(value)


def cast_params(module: nn.Module, dtype: torch.dtype, buffer_dtype: torch.dtype | None) -> None:
    """Give floating parameters this dtype, in place; buffers only if asked for, as DeepSpeed does."""
    for param in module.parameters():
        if param.is_floating_point() and param.dtype is not dtype:
            param.data = param.data.to(dtype)
    if buffer_dtype is not None:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(buffer_dtype)
