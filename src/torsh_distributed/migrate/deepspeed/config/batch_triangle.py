"""train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × data parallel ranks.

Any two imply the third, one of the sizes alone implies an accumulation of 1; a contradiction is an error that shows the
whole equation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torsh_distributed.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTriangle:
    """All three, for a number of data parallel ranks."""

    train: int
    micro: int
    accumulation: int


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, data_ranks: int | None
) -> BatchTriangle | None:
    """The three sizes from those that are given. None if the number of data parallel ranks is needed and not known.

    Raises ConfigurationError if they contradict each other, or if there is nothing to begin with.
    """
    if train is None and micro is None:
        raise ConfigurationError(
            "the config has no batch size: either train_batch_size or train_micro_batch_size_per_gpu is needed",
            hint="add train_batch_size, the samples of one optimizer update over all ranks",
        )
    if data_ranks is None:
        return None
    if train is None:
        assert micro is not None, "one of the two is given"
        passes = accumulation or 1
        return BatchTriangle(train=micro * passes * data_ranks, micro=micro, accumulation=passes)
    if micro is None:
        passes = accumulation or 1
        _require(train, train // data_ranks // passes, passes, data_ranks)
        return BatchTriangle(train=train, micro=train // data_ranks // passes, accumulation=passes)
    passes = train // micro // data_ranks if accumulation is None else accumulation
    _require(train, micro, passes, data_ranks)
    return BatchTriangle(train=train, micro=micro, accumulation=passes)


def _require(train: int, micro: int, passes: int, data_ranks: int) -> None:
    if micro > 0 and passes > 0 and train == micro * passes * data_ranks:
        return
    whole = max(1, micro) * max(1, passes) * data_ranks
    raise ConfigurationError(
        f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} × gradient_accumulation_steps {passes}"
        f" × {data_ranks} data parallel ranks = {micro * passes * data_ranks}",
        hint=f"set train_batch_size to {whole}, or leave out one of the three: it follows from the others",
        train_batch_size=train,
    )
