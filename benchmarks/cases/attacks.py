"""What strangers achieve against running jobs: another user on the node, another host on the network."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from tests.attacks.test_torch_store import attack as attack_torch_store
from tests.attacks.victim import Verdict, Victim, victim
from tests.bed import needs
from tests.lab.network import Host, Lab


def _rows(budget: Budget) -> Iterator[Row | Note]:
    reason = needs.netns()
    if reason is not None:
        yield Note(text=f"No rows: {reason}.")
        return
    with tempfile.TemporaryDirectory() as folder, victim(Path(folder)) as job:
        job.start_node(0)
        job.wait_ready()
        quiet = job.pause_s()
        yield from _judged("one node, another user", job.finish(job.attack(["user", "port"])), quiet)
    with tempfile.TemporaryDirectory() as folder:
        got, reports, _ = attack_torch_store(Path(folder))
        went_on = sum(isinstance(report["result"], list) for report in reports)
        yield Note(
            text=f"--torch-store, another user: {got['keys counted']} keys counted, and one read, one changed and one "
            f"deleted, as the guide says; {got['process files read']} files of processes read; {went_on} of "
            f"{len(reports)} ranks trained on."
        )
    if budget.is_quick:
        return
    with tempfile.TemporaryDirectory() as folder, Lab() as lab:
        first, second, stranger = lab.hosts(3)
        with victim(Path(folder), hosts=[first, second], nproc_per_node=1) as job:
            yield from _two_nodes(job, second, stranger, "two nodes, another host and another user")
    with tempfile.TemporaryDirectory() as folder, Lab() as lab:
        first, second, stranger = lab.hosts(3)
        with victim(Path(folder), hosts=[first, second], nproc_per_node=1) as job:
            yield from _two_nodes(job, second, stranger, "two nodes under TLS, another host and another user", "--tls")


def _two_nodes(job: Victim, second: Host, stranger: Host, name: str, *options: str) -> Iterator[Row | Note]:
    for node_rank in range(2):
        job.start_node(node_rank, *options)
    job.wait_ready()
    quiet = job.pause_s()
    attempts = [*job.attack(["port"], stranger), *job.attack(["user", "port"], second)]
    yield from _judged(name, job.finish(attempts), quiet)


def _judged(name: str, verdict: Verdict, quiet_s: float) -> Iterator[Row | Note]:
    pause = Measurement.of([verdict.longest_pause_s])
    yield Row(
        name=f"{name}: longest step under attack",
        unit=Unit.SECONDS,
        ours=pause,
        rivals={"without attack": Measurement.of([quiet_s])},
    )
    yield Note(
        text=f"{name}: {len(verdict.attempts)} attempts, {len(verdict.reads)} reads, {verdict.num_writes} writes, "
        f"{verdict.num_joins} joins, {verdict.num_kills} kills, {int(verdict.longest_pause_s > 1)} delays above 1 s, "
        f"{verdict.num_warnings} lines of warnings."
    )


CASE = Case(
    title="Attacks: what strangers get from a job",
    about="""A job that reduces tensors without a pause and checks every sum, while a process of another user, and one
    on another host (a network namespace), make every attempt of `tests/attacks/attacker.py`: requests without or with
    wrong, guessed, reflected or recorded proofs, floods of connections, other users' views of processes, files and
    memory. The longest step of any rank, beside the longest before the attack. Then the same under TLS, and what
    `--torch-store` gives away.""",
    rows=_rows,
)
