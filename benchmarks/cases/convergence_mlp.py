"""Does compression cost accuracy? Loss curves of the demo mlp."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.convergence import ABOUT, curves
from benchmarks.harness import Budget, Case, Note, Row
from torsh_distributed import TrainingConfig

_TRAINING = TrainingConfig(steps=1000, batch_size=128, learning_rate=5e-3)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    return curves("mlp", _TRAINING, budget)


CASE = Case(
    title="Convergence under compression: MLP classifier",
    about="An MLP that tells five spirals apart, Adam." + ABOUT,
    rows=_rows,
    x_label="step",
)
