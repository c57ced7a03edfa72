"""The loss of an Engine: computed, known for what it is a mean of, and weighted for a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.comm.collectives.objects import all_gather_varsize
from torsh_distributed.comm.groups import process_group
from torsh_distributed.parallel.models.label_share import PartCounts
from torsh_distributed.parallel.strategy import ComputeLoss, Strategy
from torsh_distributed.parallel.torch_internals import tree_flatten, tree_map_only
from torsh_distributed.plan import Plan
from torsh_distributed.train.batches import Batch, count_samples
from torsh_distributed.train.loss import LossFn, loss_of
from torsh_distributed.train.losses.loss_finding import counted_labels
from torsh_distributed.train.losses.loss_kind import LossKind, MeanOfComputed, MeanOfSamples, SumOfSamples, WholeBatch
from torsh_distributed.train.losses.loss_probe import LossProbe
from torsh_distributed.train.losses.step_weights import StepWeights, begin_step, counting
from torsh_distributed.train.losses.watched_loss import ComputedCount, WatchedLoss
from torsh_distributed.train.precision import Precision

_log = logging.getLogger(__name__)


class GatheredLoss:
    """Calls a loss_fn with the outputs and targets of every rank, in the order of the batch; equal on all ranks.

    Gradients flow to this rank's own outputs, multiplied by the number of ranks: averaging divides by it.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        group: Callable[[], dist.ProcessGroup | None],
        is_borrowed: Callable[[], bool],
    ) -> None:
        self._loss_fn, self._group, self._is_borrowed = loss_fn, group, is_borrowed

    def __call__(self, outputs: Any, targets: Any) -> Any:
        """The loss of the batch of all ranks."""
        group = self._group()
        if group is None or group.size() == 1:
            return self._loss_fn(outputs, targets)
        rows = count_samples(targets)
        own = 0 if self._is_borrowed() else rows

        def gathered(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] != rows:
                return tensor
            out: Tensor = _Gather.apply(tensor[:own], group)  # type: ignore[no-untyped-call]  # untyped in torch
            return out

        loss = self._loss_fn(tree_map_only(Tensor, gathered, outputs), tree_map_only(Tensor, gathered, targets))
        if own or not isinstance(loss, Tensor):
            return loss
        # Backward must reach the parameters of every rank: others wait for their gradients.
        mine = [one for one in tree_flatten(outputs)[0] if isinstance(one, Tensor) and one.requires_grad]
        return loss + sum(0.0 * one.sum() for one in mine)


class _Gather(torch.autograd.Function):
    """The rows of all ranks, by rank; backward keeps this rank's."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        parts = all_gather_varsize(rows, group=group)
        start = sum(len(part) for part in parts[: group.rank()])
        ctx.place, ctx.size = (start, start + len(rows)), group.size()
        return torch.cat(parts)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        start, stop = ctx.place
        return grads[0][start:stop] * ctx.size, None


Watching = Callable[[LossFn | None], tuple[LossFn | None, ComputeLoss]]
"""Makes a loss_fn and a way to compute the loss that show outputs and targets to somebody."""


@dataclass(frozen=True)
class StepSetting:
    """In what a step is computed now."""

    strategy: Strategy
    precision: Precision
    device: torch.device
    is_alone: bool
    """Ranks come and go, or step alone: one cannot ask the others what the loss is a mean of."""


class EngineLoss:
    """Computes losses for an Engine, and says what those of microbatches and ranks weigh in a step."""

    def __init__(self, loss_fn: LossFn | None, plan: Plan, group: Callable[[], dist.ProcessGroup | None]) -> None:
        """`group` has the ranks that work on different samples now."""
        self._plan = plan
        self.is_borrowed = False
        """Whether this rank computes with samples of another, which do not count."""
        if loss_fn is not None and plan.training.gather_for_loss:
            loss_fn = GatheredLoss(loss_fn, group, lambda: self.is_borrowed)
        self._watched = WatchedLoss(loss_fn)
        self._has_fn = loss_fn is not None
        self._kind: LossKind | None = None
        self._last: StepWeights | None = None
        self._has_warned = False

    @property
    def loss_fn(self) -> LossFn | None:
        """What the user wrote; None: the model computes its loss."""
        return self._watched.loss_fn if self._has_fn else None

    def unchanged(self) -> AbstractContextManager[None]:
        """Around losses that are computed to look at them: the loss_fn keeps the state that it has now."""
        return self._watched.unchanged()

    @property
    def is_sum(self) -> bool:
        """Whether it is known to be a sum over samples."""
        return isinstance(self._kind, SumOfSamples)

    @property
    def is_collective(self) -> bool:
        """Whether ranks communicate in the loss, so all must compute it equally often."""
        return self._plan.training.gather_for_loss or self._plan.training.loss_is == "global_mean"

    def compute(
        self, strategy: Strategy, model: nn.Module, batch: Batch, *, watching: Watching | None = None
    ) -> Tensor:
        """The loss of this rank's batch, under the strategy; `watching` may look at outputs and targets."""
        fn: LossFn | None = self._watched if self._has_fn else None
        fn, compute = (fn, loss_of) if watching is None else watching(fn)
        with self._watched.watching(), counting(is_borrowed=self.is_borrowed):
            loss = strategy.loss(model, batch, fn, compute)
        count = strategy.take_count()
        if count is not None:
            self._watched.note_count(count)
        return loss

    def kind(self, setting: StepSetting, batch: Batch) -> LossKind:
        """What the loss is a mean of; found with the first batch, by every rank together."""
        if self._kind is None:
            self._kind = self._find(setting, batch)
            is_computed = isinstance(self._kind, MeanOfComputed)
            parts = PartCounts(take=self._watched.take_part) if is_computed else self._kind.parts
            setting.strategy.count_labels(self._kind.labels, parts)
            self._watched.watches = is_computed and not self._watched.returns_count
        return self._kind

    def _find(self, setting: StepSetting, batch: Batch) -> LossKind:
        declared = self._plan.training.loss_is
        if self.is_collective:
            return WholeBatch()
        if declared == "auto":
            probe = LossProbe(
                setting.strategy,
                self._watched,
                lambda part: self.compute(setting.strategy, setting.strategy.unwrapped, part),
                setting.precision,
                asks_others=not setting.is_alone,
                num_rows=2 if self._plan.recovery.out_of_memory != "raise" else 8,
            )
            return probe.find_kind(batch)
        if declared == "mean_of_counted":
            return counted_labels(setting.strategy, batch)
        return SumOfSamples() if declared == "sum" else MeanOfSamples()

    def begin(
        self,
        setting: StepSetting,
        batch: Batch,
        pieces: Sequence[tuple[Batch, float]],
        *,
        evenness: float | None,
        is_again: bool,
    ) -> StepWeights:
        """The weights of the microbatches of a rank's `batch`; every rank calls this, once a step unless `is_again`."""
        strategy, training = setting.strategy, self._plan.training
        self.is_borrowed = evenness == 0.0
        is_whole = strategy.num_sample_ranks == 1 and training.gradient_accumulation == 1 and len(pieces) == 1
        if is_whole and not strategy.splits_loss:
            return StepWeights(strategy, [1.0], 1)
        # A pipeline makes a further pass of what its microbatches do not divide; all ranks make equally many.
        has_one = training.gradient_accumulation == 1 and len(pieces) == 1
        is_exact = has_one and self._plan.recovery.out_of_memory == "raise"
        made = begin_step(
            strategy,
            self.kind(setting, batch),
            pieces,
            evenness=evenness,
            device=setting.device,
            is_exact=is_exact,
            before=self._last,
            is_again=is_again,
        )
        self._last = made
        return made

    def begin_samples(
        self, strategy: Strategy, pieces: Sequence[tuple[Batch, float]], *, evenness: float | None
    ) -> StepWeights:
        """The weights of a step whose losses were not computed here: every sample weighs the same, unless the plan says
        what the loss is."""
        self.is_borrowed = evenness == 0.0
        declared = self._plan.training.loss_is
        if declared in ("sum", "global_mean"):
            kind = SumOfSamples() if declared == "sum" else WholeBatch()
            return begin_step(strategy, kind, pieces, evenness=evenness, device=torch.device("cpu"))
        if declared != "mean" and not self._has_warned and strategy.num_sample_ranks * len(pieces) > 1:
            self._has_warned = True
            tell = _log.warning if process_group.rank() == 0 else _log.debug
            tell(
                "engine.backward() got a loss that engine.forward() did not compute: it is taken for a mean over the"
                " samples of this pass. If labels or values are left out of it, or it is a sum, give the loss to"
                ' parallelize(loss_fn=…), or use td.global_mean() with training.loss_is = "global_mean";'
                ' training.loss_is = "mean" says that samples weigh alike'
            )
        return StepWeights(
            strategy, [share * (1.0 if evenness is None else evenness) for _, share in pieces], len(pieces)
        )

    def guarded(self, batch: Batch, *, is_counted: bool) -> Batch:
        """The batch with at least one counted label, where one without would not have a number for its loss."""
        return self._kind.guarded(batch) if is_counted and self._kind is not None else batch

    def weight_of_rest(self, strategy: Strategy, piece: Batch, evenness: float, total: Tensor | None) -> Tensor | float:
        """The weight of a piece of what a lost rank had, whose loss was computed last.

        `evenness`: its samples over an equal share of the step's; `total`: what all ranks of the step counted together.
        """
        if isinstance(self._kind, SumOfSamples):
            return float(strategy.data_degree)
        if total is None or self._kind is None:
            return evenness
        computed = self.take_count()
        count = self._kind.count(piece) if computed is None else computed.count
        return count * strategy.num_sample_ranks / total

    def take_count(self) -> ComputedCount | None:
        """What the last loss was a mean of, where only its computation knows."""
        return self._watched.take_count() if isinstance(self._kind, MeanOfComputed) else None

    def forget_total(self) -> None:
        """The last step failed: nothing is assumed from it."""
        self._last = None
