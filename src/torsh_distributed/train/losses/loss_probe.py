"""Finds out before the first step what a loss is a mean of, and whether the losses of parts make that of the whole.

The loss of the first batch is computed in evaluation mode while torch's loss functions are watched, then that of its
two halves. Nothing changes: no parameter, no buffer, no random state.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.compiling import uncompiled
from torsh_distributed.parallel.expert.layer import moe_layers
from torsh_distributed.parallel.local_tensors import whole_of
from torsh_distributed.parallel.models.label_share import LabelRule, PartCounts
from torsh_distributed.parallel.models.probing import probing
from torsh_distributed.parallel.strategy import Strategy
from torsh_distributed.parallel.torch_internals import tree_map_only
from torsh_distributed.train.batches import Batch, count_samples, has_rows, pick_rows, take_rows
from torsh_distributed.train.losses.loss_finding import LossFinding, counted_labels, labels_path, telling_rows
from torsh_distributed.train.losses.loss_kind import (
    LossKind,
    MeanOfComputed,
    MeanOfSamples,
    MeanOfWeights,
    SumOfSamples,
    tensors_in,
)
from torsh_distributed.train.losses.loss_terms import LossTerm
from torsh_distributed.train.losses.uneven_targets import (
    KEPT,
    Named,
    bends_means,
    changes_of,
    kind_named,
    kinds_that_fit,
    of_loss_fn,
)
from torsh_distributed.train.losses.watched_loss import WatchedLoss
from torsh_distributed.train.precision import Precision

_log = logging.getLogger(__name__)

ComputeLoss = Callable[[Batch], Tensor]

T = TypeVar("T")

_MOST_WEIGHTS = 4
"""Tensors of a batch that are tried as weights: each is two forwards."""


@dataclass(frozen=True)
class LossProbe:
    """Computes losses of a model that is about to be trained, to look at them."""

    strategy: Strategy
    loss: WatchedLoss
    compute: ComputeLoss
    """This rank's loss of a batch; all ranks call it."""
    precision: Precision
    asks_others: bool = True
    """Compare what is found with the other ranks; not where ranks come and go."""

    num_rows: int = 8
    """Enough to see what a loss does; a whole batch may not fit where the plan asks for smaller passes."""

    def find_kind(self, batch: Batch) -> LossKind:
        """What the loss is a mean of; every rank calls this, with its own part of the first batch."""
        with self.loss.untouched():
            return self._find_kind(batch)

    def _find_kind(self, batch: Batch) -> LossKind:
        shared = PartCounts(take=self.loss.take_part)
        self.strategy.count_labels(LabelRule(is_uniform=True), shared)  # nothing is weighed by what is to be found
        is_cut = all(self._everyones(has_rows(batch)))
        part = telling_rows(batch, self.num_rows) if is_cut else batch
        looked, problems = self._look_at(part)
        if problems and is_cut and any(self._everyones(count_samples(batch) > count_samples(part))):
            part = batch  # it may need more rows, such as one that takes the largest of so many losses
            looked, problems = self._look_at(part)
        if looked is None or problems:
            # Nothing is known to be wrong: the step itself raises what is.
            _log.warning(
                "the loss could not be computed in evaluation mode (%s), so it is taken for a mean over samples; if it"
                ' is not, set training.loss_is to "sum" or "mean_of_counted", or return (sum, count) from loss_fn',
                problems[0],
            )
            return MeanOfSamples()
        value, mine, seen = looked
        found = self._agreed(mine)
        kind = found.kind
        self._require_weighable(kind)
        if not is_cut:
            _log.warning("the tensors of a batch have different numbers of rows: its loss is taken for %s", kind)
            return kind
        self._refuse_bent(kind, seen)
        kind = self._for_uneven(part, found, self._fitting(part, value, found), seen)
        self._require_weighable(kind)
        return kind

    def _look_at(self, part: Batch) -> tuple[tuple[Tensor, LossFinding, tuple[Any, Any] | None] | None, list[str]]:
        """The loss of `part`, what it is, and what a loss_fn was called with; why ranks could not compute it."""
        looked, problem = None, ""
        try:
            value, terms, returns_count = self._watched(part)
            found = LossFinding.of(self.strategy, part, value, terms, returns_count=returns_count)
            looked = value, found, self.loss.seen
        except Exception as error:
            problem = _first_line(error)
        return looked, [one for one in self._everyones(problem) if one]

    def _require_weighable(self, kind: LossKind) -> None:
        if self.strategy.splits_loss and self.loss.loss_fn is not None and getattr(kind, "path", ())[:1] == (0,):
            raise ConfigurationError(
                f"the loss is {kind}, one of its inputs, and the last stage of a pipeline gets the targets only",
                hint="put what weighs the loss into the targets as well, or let loss_fn return (sum, count)",
                key="mesh.pp",
            )
        if not isinstance(kind, MeanOfComputed) or self.strategy.weighs_by_loss(has_several=kind.has_several):
            return
        raise ConfigurationError(
            f"the loss is {kind}{', in several means' if kind.has_several else ''}, and the parts of a pipeline are"
            " combined before that is known",
            hint='let loss_fn return (sum, count); or set training.loss_is: "mean" if all samples count alike,'
            ' "mean_of_counted" if labels of -100 do not count, "sum"; or set mesh.pp to 1',
            key="training.loss_is",
        )

    def _refuse_bent(self, kind: LossKind, seen: tuple[Any, Any] | None) -> None:
        bends = False
        if seen is not None:
            self.loss.watches = True
            try:
                with self._looking():
                    outputs, targets = tree_map_only(Tensor, whole_of, seen)
                    bends = bends_means(self.loss, outputs, targets, self._rounding)
            finally:
                self.loss.watches = False
        if any(self._everyones(bends)):
            raise ConfigurationError(
                f"the loss is not a multiple of {kind}: it bends that, as a root, a power or a level does below which"
                " it turns, and each rank or pass would bend its own mean",
                hint='let loss_fn return a mean, or (sum, count); training.loss_is = "mean" trains on each rank\'s own',
                key="training.loss_is",
            )

    def _for_uneven(self, batch: Batch, found: LossFinding, kind: LossKind, seen: tuple[Any, Any] | None) -> LossKind:
        """The kind that also fits where parts of the targets do not count; `kind` if it does, or if none is known.

        `seen`: what a loss_fn was called with, where this rank computes it. Every rank calls this.
        """
        is_exact = isinstance(kind, MeanOfComputed | SumOfSamples) or has_own_rule(self.strategy.whole_model)
        if is_exact:
            return kind  # it tells in every step
        self.loss.watches = True
        try:
            if self.loss.loss_fn is None:
                mine = self._of_own_loss(batch, kind, has_means=not isinstance(found.kind, MeanOfSamples))
            else:
                # Logits may be split over the ranks of a layer, all of which are here.
                with self._looking():
                    if seen is None:
                        mine = {}
                    else:
                        outputs, targets = tree_map_only(Tensor, whole_of, seen)
                        mine = of_loss_fn(
                            self.loss,
                            outputs,
                            targets,
                            kind,
                            inputs=batch[0],
                            rounding=self._rounding,
                            splits_positions=self._splits_positions,
                        )
        finally:
            self.loss.watches = False
        told: list[Any] = [[*name, is_right] for name, is_right in mine.items()]
        fits: dict[Named, bool] = {}
        for what, path, value, is_right in itertools.chain(*self._everyones(told)):
            name = (what, tuple(path), value)
            fits[name] = fits.get(name, True) and is_right
        if fits.get(KEPT, True):
            return kind
        others = [kind_named(name, kind) for name, is_right in fits.items() if is_right]
        if others:
            return others[0]
        raise ConfigurationError(
            f"the loss is {kind} in the first batch, and will not be once masks, weights or labels in the targets leave"
            " something out: losses would then differ from those of one process",
            hint='let loss_fn return (sum, count); or set training.loss_is = "mean" if nothing is ever left out'
            + ("; a mean over the positions of each row needs mesh.cp = 1" if self._splits_positions else ""),
            key="training.loss_is",
        )

    def _of_own_loss(self, batch: Batch, kind: LossKind, *, has_means: bool) -> dict[Named, bool]:
        """`kinds_that_fit` for a model that computes its loss: it runs on changed batches, with all ranks.

        Only with values that are legal anywhere: on a GPU an index that does not exist ends the process.
        """
        proposed: list[Any] = [[list(path), value] for path, value in changes_of(batch, (0,))]
        everyones = itertools.chain(*self._everyones(proposed))
        changes = list(dict.fromkeys((tuple(path), value) for path, value in everyones))

        def evaluate(part: Batch) -> tuple[float, float]:
            with self._looking():
                loss = float(self.compute(part))
            return loss, float(self.loss.take_count().count)

        is_coupled = self._splits_positions or bool(moe_layers(self.strategy.whole_model))
        if is_coupled or not all(self._everyones(count_samples(batch) > 1)):
            return {}
        return kinds_that_fit(evaluate, batch, kind, changes, has_means=has_means, rounding=self._rounding)

    @property
    def _splits_positions(self) -> bool:
        """Whether ranks have parts of sequences."""
        return self.strategy.num_sample_ranks != self.strategy.data_degree

    @property
    def _rounding(self) -> float:
        return 1e-4 if self.precision.is_full else 1e-2

    def _watched(self, batch: Batch) -> tuple[Tensor, list[LossTerm], bool]:
        self.loss.watches = True
        try:
            with self._looking():
                value = self.compute(batch).detach()
            return value, self.loss.terms, self.loss.returns_count
        finally:
            self.loss.watches = False

    @contextmanager
    def _looking(self) -> Iterator[None]:
        model = self.strategy.model
        modes = [(module, module.training) for module in model.modules()]
        was_training = model.training
        model.eval()
        try:
            with probing(model), torch.no_grad(), uncompiled(), _eager(), self.precision.computing():
                yield
        finally:
            model.train(was_training)
            for module, mode in modes:
                module.training = mode

    def _agreed(self, found: LossFinding) -> LossFinding:
        """What the first rank that saw a loss found: in a pipeline only the last stage sees it."""
        everyone = [LossFinding.unpacked(one) for one in self._everyones(found.packed())]
        seen = [one for one in everyone if one.has_seen]
        return seen[0] if seen else found

    # --- halves -----------------------------------------------------------------------------------------------

    def _fitting(self, batch: Batch, value: Tensor, found: LossFinding) -> LossKind:
        """The kind by which the losses of the halves make that of the whole; refuses a loss for which none does.

        A loss without one of torch's in it is a mean over samples, or over labels that count. Every rank calls this.
        """
        kind, strategy = found.kind, self.strategy
        # With a capacity they see all tokens at once. Of the whole model: a stage may have none, and ranks must agree.
        has_experts = bool(moe_layers(strategy.whole_model))
        if self._splits_positions:
            return kind  # parts of sequences are not losses
        kinds = [kind]
        if not found.has_seen and labels_path(batch) is not None:
            kinds.append(counted_labels(strategy, batch))
        whole, combined = float(value), [self._of_halves(batch, one) for one in kinds]
        if not all(self._everyones(any(math.isfinite(one) for one in combined))):
            batch = _with_halves_as_long(batch)
            whole, combined = self._of_rows(batch, kind)[0], [self._of_halves(batch, one) for one in kinds]
        distances = [max(self._everyones(_distance(whole, other))) for other in combined]
        best = distances.index(min(distances))
        if distances[best] <= (1e-4 if self.precision.is_full else 3e-2) or has_experts:
            return kinds[best]
        others: list[LossKind] = [SumOfSamples(), *self._weighing(batch)] if isinstance(kind, MeanOfSamples) else []
        for weighing in others:
            other = self._of_halves(batch, weighing)
            if max(self._everyones(_distance(whole, other) if math.isfinite(other) else math.inf)) <= 1e-5:
                return weighing
        again = self._of_rows(batch, kind)[0]
        if max(self._everyones(_distance(whole, again))) > 1e-6:
            return kind  # it draws random numbers
        together = combined[0]
        raise ConfigurationError(
            f"the loss is not made of the losses of its samples: {whole:.6g} for a batch and {together:.6g} for its two"
            f" halves together, taken as {kind}",
            hint="if samples are compared with each other, as in contrastive losses, set training.gather_for_loss ="
            " true; if it is a mean over something else, let loss_fn return (sum, count); if it has several means, make"
            ' each by td.global_mean() and set training.loss_is = "global_mean"; to train on each rank\'s own mean'
            ' anyway, set training.loss_is = "mean"',
            key="training.loss_is",
            losses_seen=", ".join(found.names) or "none of torch's",
        )

    def _weighing(self, batch: Batch) -> list[MeanOfWeights]:
        """Masks and weights of this batch that leave something out, on any rank, and values of which some are NaN."""
        mine: list[Any] = []
        for path, tensor in tensors_in(batch):
            if not tensor.dim() or not (tensor.dtype is torch.bool or tensor.is_floating_point()):
                continue
            if bool(tensor.isnan().any()):
                mine.append(["known", list(path)])
            elif bool((tensor >= 0).all()) and not bool((tensor == tensor.flatten()[0]).all()):
                mine.append(["weights", list(path)])
        found = dict.fromkeys((by, tuple(path)) for by, path in itertools.chain(*self._everyones(mine)))
        return [MeanOfWeights(path, by) for by, path in found][:_MOST_WEIGHTS]

    def _of_halves(self, batch: Batch, kind: LossKind) -> float:
        """The loss of the two halves, combined; NaN if there are none."""
        rows = count_samples(batch)
        halves = [(0, rows // 2), (rows // 2, rows)]
        total, count = 0.0, 0.0
        for start, stop in halves:
            value, weight = self._of_rows(take_rows(batch, start, stop), kind)
            if math.isnan(weight):
                return math.nan
            total += value * weight if weight else 0.0
            count += weight
        if not count:
            return math.nan
        return total if isinstance(kind, SumOfSamples) else total / count

    def _of_rows(self, part: Batch, kind: LossKind) -> tuple[float, float]:
        """The loss of `part` and what that counts; NaN if it cannot be computed."""
        self.loss.watches = True
        try:
            with self._looking():
                value = float(self.compute(kind.guarded(part)))
            if isinstance(kind, MeanOfComputed):
                return value, float(self.loss.take_count().count)
            return value, float(kind.count(part))
        except Exception as error:  # the user's code, on half a batch
            _log.warning("the loss of half a batch could not be computed: %s", _first_line(error))
            return math.nan, math.nan
        finally:
            self.loss.watches = False

    def _everyones(self, value: T) -> list[T]:
        if not self.asks_others or not torch.distributed.is_initialized():
            return [value]
        return all_gather_object(value)


def _with_halves_as_long(batch: Batch) -> Batch:
    """Twice the rows of `batch`, of which each half has those of one half of it, twice.

    For losses that have no value for half of so many rows: the largest of eight, a deviation over the rows.
    """
    rows = count_samples(batch)
    first, second = list(range(rows - rows // 2)), list(range(rows // 2, rows))
    return pick_rows(batch, [(half * 2)[place] for half in (first, second) for place in range(rows)])


def _distance(one: float, other: float) -> float:
    """How far apart two losses are, relative to them; one that is not a number says nothing."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0
    return max(0.0, abs(one - other) - 1e-6) / max(abs(one), abs(other), 1e-12)


@contextmanager
def _eager() -> Iterator[None]:
    """Inside, models that the user compiled run as they were written."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def has_own_rule(model: nn.Module) -> bool:
    """Whether the model's loss is one of transformers': those count labels, whatever else the batch has."""
    return hasattr(model, "loss_type") and hasattr(model, "config")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0]}"
