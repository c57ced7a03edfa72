"""A run's event files, written as the sink writes them, with known times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STEP_S = 0.1


class EventWriter:
    """Writes events of one rank, whose monotonic clock starts at `boot_s` and whose wall clock is off by `skew_s`."""

    def __init__(self, folder: Path, rank: int, *, boot_s: float = 0.0, skew_s: float = 0.0) -> None:
        self._path = folder / f"rank-{rank}.jsonl"
        self._rank, self._boot_s, self._skew_s = rank, boot_s, skew_s
        self._lines: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, kind: str, start_s: float, duration_s: float, *, timed: bool = True, **facts: Any) -> None:
        """An event from `start_s` (true time) on."""
        record = {"time": start_s + duration_s + self._skew_s, "rank": self._rank, "type": kind, **facts}
        if timed:
            record["start_s"] = start_s - self._boot_s
        self._lines.append(json.dumps({**record, "duration_s": duration_s}))

    def write(self) -> None:
        """Write the file."""
        self._path.write_text("\n".join(self._lines) + "\n")


def write_run(
    folder: Path,
    *,
    num_ranks: int = 2,
    num_steps: int = 12,
    compute_s: dict[int, float] | None = None,
    data_s: float = 0.0,
    transfer_s: float = 0.01,
    num_small: int = 0,
    num_passes: int = 1,
    num_samples: int | None = None,
    skews_s: dict[int, float] | None = None,
) -> None:
    """A data-parallel run: load, forward, backward, then an all-reduce that all ranks leave together.

    `num_small` operations of 100 bytes follow, a millisecond each, inside `transfer_s`.
    """
    writers = [
        EventWriter(folder, rank, boot_s=100.0 * rank, skew_s=(skews_s or {}).get(rank, 0.0))
        for rank in range(num_ranks)
    ]
    now_s = 1000.0
    for step in range(1, num_steps + 1):
        ready = {rank: now_s + data_s + (compute_s or {}).get(rank, 0.05) for rank in range(num_ranks)}
        end_s = max(ready.values()) + transfer_s
        for rank, writer in enumerate(writers):
            if data_s:
                writer.add("phase", now_s, data_s, phase="data", thread=1)
            for number in range(num_passes if num_passes > 1 else 0):
                writer.add("phase", now_s + data_s + 1e-4 * number, 1e-4, phase="forward", thread=1)
            writer.add("phase", now_s + data_s, ready[rank] - now_s - data_s, phase="backward", thread=1)
            large_s = end_s - 0.001 * num_small
            operations = [(ready[rank], large_s, 4 << 20)]
            operations += [(large_s + 0.001 * at, large_s + 0.001 * (at + 1), 100) for at in range(num_small)]
            for number, (begin_s, done_s, num_bytes) in enumerate(operations):
                sequence = (step - 1) * (num_small + 1) + number + 1
                facts = {"op": "all_reduce", "group": "0", "sequence": sequence, "num_bytes": num_bytes}
                writer.add("wait", begin_s, done_s - begin_s, num_started=1, thread=1, **facts)
                writer.add("collective", begin_s, done_s - begin_s, **facts)
            told = {} if num_samples is None else {"num_samples": num_samples}
            writer.add("step", now_s, end_s - now_s, timed=False, step=step, loss=1.0, **told)
        now_s = end_s
    for writer in writers:
        writer.write()
