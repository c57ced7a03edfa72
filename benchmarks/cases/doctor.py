"""Does the doctor name the missing rank, the collective and the cause of a hang, and how soon?"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.hang_matrix import BACKENDS, DEADLINE_S, HANGS, Hang, HangOutcome, run_hang
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit

_NUM_RANKS = (2, 4)
_QUICK_HANGS = ("loader waits", "stopped")


def _rows(budget: Budget) -> Iterator[Row | Note]:
    backends = ("shm",) if budget.is_quick else BACKENDS
    sizes = _NUM_RANKS[:1] if budget.is_quick else _NUM_RANKS
    hangs = [hang for hang in HANGS if not budget.is_quick or hang.name in _QUICK_HANGS]
    num_jobs = max(1, len(os.sched_getaffinity(0)) // 2)
    with tempfile.TemporaryDirectory(prefix="torsh-hangs-") as root, ThreadPoolExecutor(num_jobs) as pool:
        cells = [(backend, num_ranks) for backend in backends for num_ranks in sizes]
        running = {(*cell, hang.name): pool.submit(_run, hang, *cell, Path(root)) for cell in cells for hang in hangs}
        for backend, num_ranks in cells:
            outcomes = {hang.name: running[backend, num_ranks, hang.name].result() for hang in hangs}
            yield from _told(f"{backend}, {num_ranks} ranks", outcomes)
    yield Note(text=f"{num_jobs} jobs at a time")


def _run(hang: Hang, backend: str, num_ranks: int, root: Path) -> HangOutcome:
    folder = root / f"{hang.name}-{backend}-{num_ranks}"
    folder.mkdir()
    return run_hang(hang, backend, num_ranks, folder)


def _told(name: str, outcomes: dict[str, HangOutcome]) -> Iterator[Row | Note]:
    num = len(outcomes)
    right_call = sum(one.is_right_rank and one.is_right_call for one in outcomes.values())
    right_cause = sum(one.is_right_cause for one in outcomes.values())
    wrong = [hang for hang, one in outcomes.items() if not one.is_right]
    said = f"; not right: {', '.join(wrong)}" if wrong else ""
    right = f"rank and collective right in {right_call} of {num}, cause in {right_cause} of {num}"
    yield Note(text=f"{name}: {right}{said}")
    answers = [one.answer_s for one in outcomes.values() if one.answer_s is not None]
    verdicts = [max(0.0, one.verdict_s) for one in outcomes.values() if one.verdict_s is not None]
    if answers:
        yield Row(name=f"{name}: answer on demand", unit=Unit.SECONDS, ours=_with_worst(answers))
    if verdicts:
        yield Row(name=f"{name}: report after the deadline", unit=Unit.SECONDS, ours=_with_worst(verdicts))


def _with_worst(samples: list[float]) -> Measurement:
    """The median, with the longest at the upper end."""
    whole = Measurement.of(samples)
    return Measurement(median=whole.median, low=whole.low, high=max(samples), num_samples=whole.num_samples)


CASE = Case(
    title="Hangs: what the doctor says",
    about=f"""Rank 1 of a plain torch script keeps the others waiting, in fifteen ways (`benchmarks/hang_matrix.py`).
    The launcher is asked while they wait, as `torsh doctor --pid` asks it, and reports when the deadline of
    {DEADLINE_S:g} s has passed. The upper end of a row is the longest.""",
    rows=_rows,
)
