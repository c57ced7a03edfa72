"""All-reduce between two hosts under TLS, beside the same without it and beside gloo."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cases.collectives import KB, MB, Times, shown, time_all
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.bed import needs
from tests.bed.world import World
from tests.lab.network import Lab
from torsh_distributed.comm.trust.job_tls import make_certificate

_PLAN = [("all_reduce", 64 * KB), ("all_reduce", MB), ("all_reduce", 16 * MB)]


def _rows(budget: Budget) -> Iterator[Row | Note]:
    missing = needs.netns() or needs.command("openssl")
    if missing:
        yield Note(text=f"Not measured here: {missing}.")
        return
    rounds, duration_s = (1, 0.1) if budget.is_quick else (3, 1.5)
    world = World()
    try:
        with tempfile.TemporaryDirectory() as folder:
            under_tls = {**make_certificate(Path(folder)).variables(), "TORSH_JOB_TOKEN": "the secret of a benchmark"}
            ways = {"tls": ("torsh", under_tls), "without": ("torsh", {}), "gloo": ("gloo", {})}
            for rate_gbps in (1.0, None) if budget.is_quick else (0.1, 1.0, None):
                with Lab() as lab:
                    hosts = lab.hosts(2)
                    for host in hosts if rate_gbps is not None else ():
                        host.limit(rate_gbps)
                    found: list[dict[str, Times]] = [
                        {
                            way: world.run(
                                time_all,
                                _PLAN,
                                duration_s,
                                num_ranks=2,
                                backend=name,
                                hosts=hosts,
                                env=env,
                                timeout_s=300,
                            )[0]
                            for way, (name, env) in ways.items()
                        }
                        for _ in range(rounds)
                    ]
                link = "link without a limit" if rate_gbps is None else f"{rate_gbps:g} Gbit/s"
                for op, size in _PLAN:
                    yield Row(
                        name=f"{op}, {link}, {shown(size)}",
                        unit=Unit.SECONDS,
                        ours=Measurement.of([one["tls"][op, size] for one in found]),
                        rivals={
                            "without TLS": Measurement.of([one["without"][op, size] for one in found]),
                            "gloo, without TLS": Measurement.of([one["gloo"][op, size] for one in found]),
                        },
                    )
    finally:
        world.close()


CASE = Case(
    title="TLS between two hosts",
    about="""Hosts are network namespaces on one machine, joined by a bridge, with one rank on each. The torsh backend
    encrypts over connections of its own; without TLS it uses gloo's. Both ranks share the machine's cores with the
    encryption.""",
    rows=_rows,
)
