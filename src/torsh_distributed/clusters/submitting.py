"""`submit`: hand a job to an engine from Python, and follow it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torsh_distributed.clusters.base import ClusterEngine, JobStatus
from torsh_distributed.clusters.job_records import JobRecord, find_record, forget, job_directory, remember
from torsh_distributed.clusters.registry import open_engine
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.launch.entry import check_entry
from torsh_distributed.launch.spec import ElasticSpec, Entry, EntryKind


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job that an engine has taken. Any process of this user finds it again with `find_job`."""

    record: JobRecord
    engine: ClusterEngine

    @property
    def name(self) -> str:
        """The job's name."""
        return self.record.name

    def status(self) -> JobStatus:
        """Where it stands now."""
        return self.engine.status(self.record.job_id)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """The output of all ranks; with `follow` until the job is over."""
        return self.engine.logs(self.record.job_id, follow=follow)

    def cancel(self) -> None:
        """End it; returns when nothing of it runs."""
        self.engine.cancel(self.record.job_id)

    def scale(self, workers: int) -> None:
        """Change its size, if it is elastic and the engine can."""
        if workers < 1:
            raise InvalidArgument("a job needs at least one worker", hint="end it with `torsh cancel`", workers=workers)
        self.engine.scale(self.record.job_id, workers)

    def wait(self) -> JobStatus:
        """Return how it ended, when it has. The engine's log is read to its end, which is when the job is over."""
        for _ in self.logs(follow=True):
            continue
        return self.status()


def submit(
    script: str | Path,
    *args: str,
    to: str,
    name: str | None = None,
    kind: EntryKind = EntryKind.SCRIPT,
    nodes: int = 1,
    nproc_per_node: int = 1,
    gpus_per_worker: int = 0,
    cpus_per_worker: int = 1,
    memory_per_worker: str | None = None,
    plan: str | Path | None = None,
    working_dir: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    time_limit_s: float | None = None,
    max_restarts: int = 0,
    elastic: ElasticSpec | None = None,
    options: Mapping[str, str] | None = None,
) -> SubmittedJob:
    """Hand a script to the engine `to`; it runs there as under `torsh run`. Returns when the engine has taken it.

    What is wrong with the script, the plan, the resources or the engine's options raises here, and nothing is left.
    """
    submission = Submission(
        entry=Entry(kind=kind, target=str(script), args=tuple(args)),
        name=name or new_job_name(str(script)),
        nodes=nodes,
        workers_per_node=nproc_per_node,
        gpus_per_worker=gpus_per_worker,
        cpus_per_worker=cpus_per_worker,
        memory_per_worker=memory_per_worker,
        plan=None if plan is None else Path(plan).resolve(),
        working_dir=Path.cwd() if working_dir is None else Path(working_dir).resolve(),
        env=dict(env or {}),
        time_limit_s=time_limit_s,
        max_restarts=max_restarts,
        elastic=elastic,
        options=dict(options or {}),
    )
    return hand_over(submission, to=to)


def hand_over(submission: Submission, *, to: str) -> SubmittedJob:
    """Check the submission, give it to the engine and remember it."""
    check_submission(submission)
    engine = open_engine(to, submission.options)
    is_new = not job_directory(submission.name).joinpath("job.json").exists()
    if not is_new:
        raise InvalidArgument(
            f"a job named {submission.name!r} was submitted before",
            hint="give another --name, or forget that one: `torsh jobs --forget NAME`",
            name=submission.name,
        )
    try:
        job_id = engine.submit(submission)
    except BaseException:
        forget(submission.name)
        raise
    try:
        record = remember(submission, engine=to, job_id=job_id, found_at=engine.found_at())
    except BaseException:
        # Nobody would find it again.
        engine.cancel(job_id)
        forget(submission.name)
        raise
    return SubmittedJob(record, engine)


def check_submission(submission: Submission) -> None:
    """Raise what can be known without the engine: a script that is not there, a plan that does not fit."""
    if submission.entry.kind is EntryKind.SCRIPT:
        target = submission.working_dir / submission.entry.target
        check_entry(Entry(kind=EntryKind.SCRIPT, target=str(target)))
    if submission.plan is not None:
        from torsh_distributed.plan import Plan

        Plan.load(submission.plan).validate(submission.num_workers)
    elastic = submission.elastic
    if elastic is not None and not elastic.min_workers <= submission.num_workers <= elastic.max_workers:
        raise ConfigurationError(
            f"the job starts with {submission.num_workers} workers, outside the {elastic.min_workers} to "
            f"{elastic.max_workers} that it may have",
            hint="change --nodes, --nproc-per-node, --min-workers or --max-workers",
        )


def find_job(name: str) -> SubmittedJob:
    """A job that this user submitted before, by its name or its engine's id."""
    record = find_record(name)
    return SubmittedJob(record, open_engine(record.engine, record.options))


def new_job_name(target: str) -> str:
    """A name that says what runs and that no other job has."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(target).stem).strip("-").lower() or "job"
    return f"{stem[:40]}-{secrets.token_hex(3)}"
