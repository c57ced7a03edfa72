"""Does compression cost accuracy? Loss curves of an MLP classifier."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.convergence import ABOUT, curves
from benchmarks.harness import Budget, Case, Note, Row
from torsh_distributed import TrainingConfig

_TRAINING = TrainingConfig(steps=3000, batch_size=128, learning_rate=0.02)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    return curves("classifier", _TRAINING, budget)


CASE = Case(
    title="Convergence under compression: MLP classifier",
    about="An MLP (77 k parameters) that learns ten classes from a noisy random teacher, SGD with momentum." + ABOUT,
    rows=_rows,
    x_label="step",
)
