"""A load test: how soon a thousand workers know that one of them died, and what they cost the launcher."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from benchmarks.light_workers import ControlLoad, measure_load


def _row(name: str, value: float, unit: Unit) -> Row:
    return Row(name=name, unit=unit, ours=Measurement.of([value]))


def _rows_of(name: str, load: ControlLoad) -> Iterator[Row | Note]:
    yield Row(name=f"{name}: a death is known to all", unit=Unit.SECONDS, ours=Measurement.of(load.known_s))
    yield _row(f"{name}: processor time of the launcher in a second", load.cpu_share, Unit.SECONDS)
    yield _row(f"{name}: memory of the launcher", load.peak_bytes, Unit.BYTES)
    yield Note(
        text=f"{name}: {len(load.known_s)} deaths were known to all after {_percentiles(load.known_s)}, to half of the"
        f" workers after {load.median_known_s * 1e3:.0f} ms (median); while nothing happens the launcher uses"
        f" {100 * load.cpu_share:.0f} % of a core and has used {load.peak_bytes / 2**20:.0f} MiB at most"
    )


def _percentiles(samples: list[float]) -> str:
    ordered = sorted(1e3 * sample for sample in samples)
    p95 = ordered[round(0.95 * (len(ordered) - 1))]
    return (
        f"{statistics.median(ordered):.0f} ms (median), {p95:.0f} ms (95th percentile), {ordered[-1]:.0f} ms (longest)"
    )


def _rows(budget: Budget) -> Iterator[Row | Note]:
    num_workers, num_nodes, num_kills = (40, 4, 2) if budget.is_quick else (1000, 125, 20)
    alone = measure_load(num_nodes=1, nproc_per_node=num_workers, num_kills=num_kills)
    yield from _rows_of(f"{num_workers} workers on one node", alone)
    per_node = num_workers // num_nodes
    spread = measure_load(
        num_nodes=num_nodes,
        nproc_per_node=per_node,
        num_kills=min(num_kills, per_node - 2),
        heartbeat_timeout_s=30 if budget.is_quick else 1,
    )
    yield from _rows_of(f"{num_workers} workers on {num_nodes} nodes", spread)


CASE = Case(
    title="Control plane: a thousand workers",
    about="""A load test with light workers: they beat ten times a second and enter every world they are told of, over
    real sockets, under a real launcher. One is killed, again and again. On one node every worker is a process with a
    line of its own to one launcher; on many nodes the other launchers are connections that one process plays, and a
    death is known when it has reached each of them.""",
    rows=_rows,
)
