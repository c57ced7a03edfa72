"""Does the launcher name the right rank and the right cause, and how soon? Faults × backends × numbers of ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.fault_matrix import BACKENDS, FAULTS, run_fault, why_no_memory_group, why_no_mpi
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit

_NUM_RANKS = (2, 4)
_QUICK_FAULTS = 3


def _rows(budget: Budget) -> Iterator[Row | Note]:
    num_runs = 1 if budget.is_quick else 20
    num_jobs = max(1, len(os.sched_getaffinity(0)) * 5 // 8)
    missing = {"mpi4py": why_no_mpi(), "out of memory": why_no_memory_group()}
    for name, reason in missing.items():
        if reason is not None:
            yield Note(text=f"{name} is left out: {reason}")
    cells = [
        (fault, backend, num_ranks)
        for fault in (FAULTS[:_QUICK_FAULTS] if budget.is_quick else FAULTS)
        for backend in (("torsh",) if budget.is_quick else BACKENDS)
        for num_ranks in (_NUM_RANKS[:1] if budget.is_quick else _NUM_RANKS)
        if not (missing.get(backend) or missing.get(fault.name))
    ]
    num_all = num_right_rank = num_right_cause = 0
    with tempfile.TemporaryDirectory(prefix="torsh-faults-") as root, ThreadPoolExecutor(num_jobs) as pool:
        # All at once, so that no job waits for the slowest of the cell before.
        runs = [
            pool.submit(run_fault, *cell, Path(root) / "-".join((cell[0].name, *map(str, cell[1:]))), num_runs=num_runs)
            for cell in cells
        ]
        for (fault, backend, num_ranks), started in zip(cells, runs, strict=True):
            outcomes = started.result()
            num_all += len(outcomes)
            num_right_rank += sum(outcome.is_right_rank for outcome in outcomes)
            num_right_cause += sum(outcome.is_right_cause for outcome in outcomes)
            name = f"{fault.name}, {backend}, {num_ranks} ranks"
            wrong = [one for one in outcomes if not (one.is_right_rank and one.is_right_cause)]
            if wrong:
                said = [line for line in wrong[0].output.splitlines() if line.startswith("torsh run: ")]
                yield Note(text=f"{name}: wrong in {len(wrong)} of {len(outcomes)}: {' / '.join(said[:2])}")
            times = [one.verdict_s for one in outcomes if one.verdict_s is not None]
            if times:
                yield Row(name=name, unit=Unit.SECONDS, ours=_with_p95(times))
    yield Note(
        text=f"right rank in {num_right_rank} of {num_all} runs ({100 * num_right_rank / num_all:.1f} %), "
        f"right cause in {num_right_cause} ({100 * num_right_cause / num_all:.1f} %), {num_jobs} jobs at a time; "
        "the number of a row is the median of the time from fault to verdict, its upper end the 95th percentile"
    )


def _with_p95(samples: list[float]) -> Measurement:
    """The median, with the 95th percentile at the upper end."""
    ordered = sorted(samples)
    whole = Measurement.of(ordered)
    high = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return Measurement(median=whole.median, low=whole.low, high=high, num_samples=whole.num_samples)


CASE = Case(
    title="Faults: the cause that the launcher names",
    about="""Rank 1 of a job does one thing wrong in its fifth step; `torsh run` has to name that rank and that cause.
    Seconds from the fault to the first line of the report; where ranks wait and the backend does not notice,
    to the notice on the wait.""",
    rows=_rows,
)
