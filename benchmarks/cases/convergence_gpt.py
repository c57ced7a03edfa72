"""Does compression cost accuracy? Loss curves of the character GPT."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.convergence import ABOUT, curves
from benchmarks.harness import Budget, Case, Note, Row
from torsh_distributed import TrainingConfig

_TRAINING = TrainingConfig(steps=3000, batch_size=16, learning_rate=3e-3)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    return curves("gpt", _TRAINING, budget)


CASE = Case(
    title="Convergence under compression: character GPT",
    about="A character GPT (2 layers, width 32, AdamW) on synthetic text: six characters, drawn given the last two."
    + ABOUT,
    rows=_rows,
    x_label="step",
)
