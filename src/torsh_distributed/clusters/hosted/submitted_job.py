"""A submitted script between the process that submits it and the driver that runs it: plain values, then a job."""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from torsh_distributed.clusters.hosted.hosted_job import HostedJob, HostedSpec
from torsh_distributed.clusters.hosted.rank_host import EntryWork, HostPool
from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import ProcessFailure, TorshError
from torsh_distributed.launch.spec import ElasticSpec, Entry, EntryKind


def job_values(submission: Submission, job_id: str, *, own_interpreters: bool) -> dict[str, Any]:
    """The job as JSON carries it. Paths below the working directory become relative to it."""
    entry, plan = submission.entry, submission.plan
    target = Path(entry.target)
    if target.is_absolute() and target.is_relative_to(submission.working_dir):
        target = target.relative_to(submission.working_dir)
    return {
        "job_id": job_id,
        "name": submission.name,
        "entry": {**asdict(entry), "target": str(target), "args": list(entry.args)},
        "num_workers": submission.num_workers,
        "max_restarts": submission.max_restarts,
        "elastic": None if submission.elastic is None else asdict(submission.elastic),
        "time_limit_s": submission.time_limit_s,
        "env": dict(submission.env),
        "plan": None if plan is None else [plan.name, plan.read_text()],
        "own_interpreters": own_interpreters,
    }


def spec_of(job: dict[str, Any]) -> HostedSpec:
    """The job from its plain values; what its scripts print is printed."""
    entry = job["entry"]
    return HostedSpec(
        work=EntryWork(
            entry=Entry(kind=EntryKind(entry["kind"]), target=entry["target"], args=tuple(entry["args"])),
            plan=None if job["plan"] is None else (job["plan"][0], job["plan"][1]),
            working_dir=job.get("working_dir"),
            own_interpreter=job["own_interpreters"],
        ),
        name=job["name"],
        num_workers=job["num_workers"],
        max_restarts=job["max_restarts"],
        elastic=None if job["elastic"] is None else ElasticSpec(**job["elastic"]),
        variables=job["env"],
        time_limit_s=job["time_limit_s"],
        show=lambda line: print(line, flush=True),
    )


def drive(pool: HostPool, spec: HostedSpec) -> int:
    """Run the job to its end, in the driver's main thread; its exit code, as `torsh run` returns it."""
    logging.basicConfig(format="torsh: %(message)s", level=logging.WARNING)
    signal.signal(signal.SIGTERM, _end)
    try:
        HostedJob(pool, spec).run()
    except TorshError as error:
        print(f"torsh: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr, flush=True)
        return int(error.context.get("exit_code") or 1) if isinstance(error, ProcessFailure) else 1
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM from the engine: leave through the finally clauses, which end the ranks."""
    raise SystemExit(128 + number)
