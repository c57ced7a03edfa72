"""What a loss counts once parts of the targets do not count, though all of those in the first batch do.

`logits[mask]` with a mask that is full, sample weights that are all 1, labels without the one that stands for padding:
the first batch looks like a mean over samples, and later ones are none. So the loss is tried on a few rows of which
some entries were changed: those of masks, weights and lengths become 0, labels 0, -1, -100 or 255, and values NaN, as
far as the loss has a value then. Masks among the model's outputs are tried too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torsh_distributed.parallel.models.label_share import LabelRule
from torsh_distributed.parallel.torch_internals import tree_leaves, tree_map_only
from torsh_distributed.train.batches import Batch, count_samples, pick_rows
from torsh_distributed.train.losses.loss_kind import (
    LossKind,
    MeanOfComputed,
    MeanOfLabels,
    MeanOfWeights,
    Path,
    replaced,
    tensor_at,
    tensors_in,
)
from torsh_distributed.train.losses.watched_loss import WatchedLoss

_ROWS = 4
"""At least so many are needed for uneven halves: fewer are repeated."""
_SMALLER = (0.1, 0.01, 1e-4)
"""Of its means, at which a loss is looked at for a level below which it turns."""
_MOST_CHANGES = 12
_MOST_ON_HOST = 2**22
"""Elements of outputs and targets."""

Named = tuple[str, Path, int]
"""A kind in plain values: its name, where its tensor is, which value does not count."""
Change = tuple[Path, float]
"""Where a tensor is, and what some of its entries become."""
Evaluate = Callable[[Batch], tuple[float, float]]
"""A loss, and what torch's losses in it are a mean of; 0 if there are none."""

_MISSING = (0, -1, -100, 255)
"""What people write in place of a label; torch's losses ignore -100 by themselves."""

KEPT: Named = ("kept", (), 0)
_COMPUTED: Named = ("computed", (), 0)


class _Called(NamedTuple):
    """What a loss_fn is called with: two dicts are not a list of samples here, whatever is in them."""

    outputs: Any
    targets: Any


def kind_named(name: Named, kept: LossKind) -> LossKind:
    """The kind of this name, which ranks have told each other."""
    what, path, value = name
    if what == "computed":
        return MeanOfComputed()
    if what in ("weights", "not negative", "known"):
        return MeanOfWeights(path, what)  # type: ignore[arg-type]  # narrowed by `in`
    return MeanOfLabels(path, LabelRule(value)) if what == "labels" else kept


def of_loss_fn(
    loss: WatchedLoss,
    outputs: Any,
    targets: Any,
    kept: LossKind,
    *,
    inputs: Any = None,
    rounding: float = 1e-4,
    splits_positions: bool = False,
) -> dict[Named, bool]:
    """`kinds_that_fit` for a loss_fn: only that runs, on copies on the host, where an index that does not exist raises
    and harms nothing; the model's outputs stay as they are. Empty if nothing could be tried.

    `inputs`: what the model got. An output may be one of them, such as a mask, and then tells what counts; a mask that
    the model made itself does not, so only `kept` can fit.
    `splits_positions`: ranks have parts of sequences, dim 1 of tensors, so halves of those must make the whole, too.
    """
    leaves = [one for one in tree_leaves((outputs, targets)) if isinstance(one, Tensor) and one.dim()]
    if not leaves or any(hasattr(one, "to_local") for one in leaves) or len({len(one) for one in leaves}) != 1:
        return {}
    if getattr(kept, "path", (1,))[:1] != (1,):
        return {}  # the inputs are not at hand
    # Logits over a large vocabulary would take seconds on the host: they stay, and only legal labels are tried.
    is_small = sum(one.numel() for one in leaves) <= _MOST_ON_HOST
    rows = list(range(len(leaves[0]))) * (1 if len(leaves[0]) >= _ROWS else _ROWS)
    batch: Batch = pick_rows(_Called(outputs, targets), rows)
    if is_small:
        batch = tree_map_only(Tensor, lambda one: one.detach().cpu(), batch)

    def evaluate(part: Batch) -> tuple[float, float]:
        return float(loss(*part)), float(loss.take_count().count)

    try:
        loss(*batch)
    except Exception:  # the user's code, on the host in place of its device
        return {}
    has_means = any(term.reduction == "mean" for term in loss.terms)
    ignored = {term.rule.ignore_index for term in loss.terms if term.rule is not None and term.reduction == "none"}
    # What means of torch's ignore is known.
    labels: Sequence[int] = (0, -1) if has_means else tuple(dict.fromkeys((*_MISSING, *sorted(ignored))))
    is_on_host = is_small or leaves[0].device.type == "cpu"
    changes = list(changes_of((None, targets), labels if is_on_host else (0,)))
    changes += [(path, math.nan) for path, tensor in tensors_in((None, targets)) if tensor.is_floating_point()]
    changes += changes_of((outputs, None), (0,))
    lengths = {one.shape[1] for one in tree_leaves(batch) if isinstance(one, Tensor) and one.dim() > 1}
    length = min(lengths) if splits_positions and len(lengths) == 1 else 1
    fits = kinds_that_fit(
        evaluate, batch, kept, changes, has_means=has_means, rounding=rounding, length=length, labels=labels
    )
    return _in_the_batch(fits, outputs, inputs)


def bends_means(loss: WatchedLoss, outputs: Any, targets: Any, rounding: float) -> bool:
    """Whether the loss is more than a multiple of the means in it: their root, or another where they are small.

    Each rank would bend the mean of its own samples. A level below which a loss turns shows late in training, so the
    means are made smaller here.
    """
    found = []
    try:
        for loss.scale in (1.0, 0.5, *_SMALLER, 1.0):
            with loss.unchanged():
                found.append(float(loss(outputs, targets)))
    except Exception:  # the user's code, on means that it may never see
        return False
    finally:
        loss.scale = 1.0
    whole, half, *smaller, again = found
    if whole != again:
        return False  # it draws random numbers
    rest = 2 * half - whole  # what is left of a line where its means are 0
    offs = [abs(one - rest - scale * (whole - rest)) for scale, one in zip(_SMALLER, smaller, strict=True)]
    return any(math.isfinite(off) and off > 10 * rounding * max(abs(whole), abs(rest)) + 1e-6 for off in offs)


def _in_the_batch(fits: dict[Named, bool], outputs: Any, inputs: Any) -> dict[Named, bool]:
    """Without kinds that count by an output, unless it is an input that the model has passed on."""
    found: dict[Named, bool] = {}
    for (what, path, value), is_right in fits.items():
        if path[:1] != (0,):
            found[what, path, value] = is_right
            continue
        seen = tensor_at((outputs,), path)
        for place, tensor in tensors_in((inputs,)):
            # The same memory: another mask that is full here need not be later.
            if tensor.data_ptr() == seen.data_ptr() and tensor.shape == seen.shape:
                found[what, place, value] = is_right
                break
    return found


def changes_of(batch: Batch, labels: Sequence[int]) -> Iterator[Change]:
    """What to change: entries of integers to one of `labels`, of masks and of numbers that are all alike to 0."""
    for path, tensor in tensors_in(batch):
        if not tensor.numel() or not tensor.dim():
            continue
        if _has_labels(tensor):
            yield from ((path, value) for value in labels)
        elif tensor.dtype is torch.bool or bool(((tensor == 0) | (tensor == tensor.flatten()[0])).all()):
            yield path, 0


def kinds_that_fit(
    evaluate: Evaluate,
    batch: Batch,
    kept: LossKind,
    changes: Sequence[Change],
    *,
    has_means: bool,
    rounding: float = 1e-4,
    length: int = 1,
    labels: Sequence[int] = _MISSING,
) -> dict[Named, bool]:
    """For `kept` and for what may take its place: whether the halves of every changed batch make the whole.

    Empty if none makes that of the batch as it is: the loss draws random numbers then. `kept` need not, where parts of
    the first batch do not count either. `evaluate` is called three times for each change, whatever comes of it: ranks
    may communicate in it.
    """
    fits: dict[Named, bool] = {}
    paths = {path: tensor_at(batch, path) for path, _ in changes}
    tensors = [(path, _uneven(tensor_at(batch, path), value)) for path, value in changes[:_MOST_CHANGES]]
    is_judged = True
    for number, changed in enumerate([batch, *(replaced(batch, path, tensor) for path, tensor in tensors)]):
        for parts in _divided(changed, length):
            found = [_tried(evaluate, part) for part in parts]
            if not all(math.isfinite(loss) for loss, _ in found):
                continue  # the user's code, on targets that it may never see
            for name in _candidates(paths, labels, has_means=has_means):
                kind = kind_named(name, kept)
                is_computed = isinstance(kind, MeanOfComputed)
                counts = [
                    count if is_computed else float(kind.count(part))
                    for part, (_, count) in zip(parts, found, strict=True)
                ]
                if sum(counts[1:]):
                    fits[name] = fits.get(name, True) and _makes([loss for loss, _ in found], counts[1:], rounding)
        if number == 0:
            is_judged = any(fits.values())
    return fits if is_judged else {}


def _divided(batch: Batch, length: int) -> Iterator[list[Batch]]:
    """The batch and its two halves: of its rows, and of sequences of `length` if that is more than one position."""
    rows = count_samples(batch)
    yield [batch, *(pick_rows(batch, part) for part in (range(rows // 2), range(rows // 2, rows)))]
    if length > 1:
        half = length // 2  # as long as the other one: ranks have equally many positions

        def cut(start: int, size: int) -> Batch:
            return tree_map_only(Tensor, lambda one: one.narrow(1, start, size) if one.dim() > 1 else one, batch)

        yield [cut(0, 2 * half), cut(0, half), cut(half, half)]


def _tried(evaluate: Evaluate, part: Batch) -> tuple[float, float]:
    try:
        return evaluate(part)
    except Exception:  # as above
        return math.nan, 0.0


def _candidates(paths: dict[Path, Tensor], labels: Sequence[int], *, has_means: bool) -> Iterator[Named]:
    yield KEPT
    if has_means:
        yield _COMPUTED
        return
    for path, tensor in paths.items():
        yield "weights", path, 0
        if tensor.is_floating_point():
            yield "known", path, 0
        if _has_labels(tensor):
            yield "not negative", path, 0
            yield from (("labels", path, value) for value in labels)


def _uneven(tensor: Tensor, value: float) -> Tensor:
    """The tensor with other entries in the second half of its rows, so that halves are uneven."""
    out, half = tensor.clone(), len(tensor) // 2
    if tensor.dim() > 1 and tensor.shape[-1] > 1:
        out[half:, ..., 1::2] = value
        out[half + 1 : half + 2, ..., 1:] = value
    else:
        out[half + 1 :: 2] = value
    return out


def _has_labels(tensor: Tensor) -> bool:
    """Whether these may be labels; those of several tasks are often floating, and -1 where one is not known."""
    if tensor.is_complex() or tensor.dtype is torch.bool:
        return False
    return not tensor.is_floating_point() or bool((tensor == tensor.round()).all())


def _makes(losses: Sequence[float], counts: Sequence[float], rounding: float) -> bool:
    """Whether the losses of two halves that count so much make the first one, that of the whole."""
    whole, *halves = losses
    together = sum(loss * count for loss, count in zip(halves, counts, strict=True) if count) / sum(counts)
    return abs(together - whole) <= rounding * max(abs(together), abs(whole)) + 1e-6
