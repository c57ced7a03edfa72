"""All-reduce between two hosts with two ranks each, over a limited link: torsh against gloo."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases.collectives import KB, MB, Times, shown, time_all
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed import needs
from tests.bed.world import World
from tests.lab.network import Lab

_PLAN = [("all_reduce", 64 * KB), ("all_reduce", MB), ("all_reduce", 16 * MB)]


def _rows(budget: Budget) -> Iterator[Row | Note]:
    missing = needs.netns()
    if missing:
        yield Note(text=f"Not measured here: {missing}.")
        return
    rounds, duration_s = (1, 0.1) if budget.is_quick else (3, 1.5)
    world = World()
    try:
        for rate_gbps in (1.0,) if budget.is_quick else (1.0, 0.1):
            with Lab() as lab:
                first, second = lab.hosts(2)
                for host in (first, second):
                    host.limit(rate_gbps)
                hosts = [first, first, second, second]
                found: list[dict[str, Times]] = [
                    {
                        name: world.run(
                            time_all, _PLAN, duration_s, num_ranks=4, backend=name, hosts=hosts, timeout_s=300
                        )[0]
                        for name in ("torsh", "gloo")
                    }
                    for _ in range(rounds)
                ]
            for op, size in _PLAN:
                yield Row(
                    name=f"{op}, {rate_gbps:g} Gbit/s, {shown(size)}",
                    unit=Unit.SECONDS,
                    ours=Measurement.of([one["torsh"][op, size] for one in found]),
                    rivals={"gloo": Measurement.of([one["gloo"][op, size] for one in found])},
                )
    finally:
        world.close()


CASE = Case(
    title="Two hosts, two ranks each",
    about="""Hosts are network namespaces on one machine, joined by a bridge; each host's link is limited with a token
    bucket. torsh shares memory inside a host and sends shards between them; gloo runs one ring over all four ranks.""",
    rows=_rows,
)
