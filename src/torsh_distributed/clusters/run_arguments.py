"""A submission as arguments of `torsh run`, for engines that start launchers."""

from __future__ import annotations

from torsh_distributed.clusters.submission import Submission
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.launch.spec import EntryKind

_KINDS: dict[EntryKind, list[str]] = {
    EntryKind.SCRIPT: [],
    EntryKind.MODULE: ["-m"],
    EntryKind.COMMAND: ["--no-python"],
}


def entry_arguments(submission: Submission) -> list[str]:
    """Options for the job as a whole, then what runs; nodes and workers are the engine's to add before."""
    words = ["--rdzv-id", submission.name]
    if submission.max_restarts:
        words += ["--max-restarts", str(submission.max_restarts)]
    if submission.plan is not None:
        words += ["--plan", str(submission.plan)]
    if submission.elastic is not None:
        elastic = submission.elastic
        words += ["--elastic", "--min-workers", str(elastic.min_workers), "--max-workers", str(elastic.max_workers)]
        words += ["--on-loss", elastic.on_loss]
    entry = submission.entry
    return [*words, *_KINDS[entry.kind], entry.target, *entry.args]


def refuse_limits(submission: Submission, *, engine: str) -> None:
    """Raise InvalidArgument for resources that an engine without a scheduler cannot give to single ranks."""
    wanted = {
        "--memory-per-worker": submission.memory_per_worker,
        "--gpus-per-worker": submission.gpus_per_worker if submission.gpus_per_worker > 1 else None,
    }
    for option, value in wanted.items():
        if value is not None:
            raise InvalidArgument(
                f"the engine {engine!r} has no scheduler: {option} {value} would have no effect",
                hint="leave it out; a rank uses the GPU of its LOCAL_RANK",
            )


def rank_variables(submission: Submission) -> dict[str, str]:
    """Variables that the submission's resources mean for every rank; the user's own win."""
    threads = {"OMP_NUM_THREADS": str(submission.cpus_per_worker)} if submission.cpus_per_worker > 1 else {}
    return {**threads, **submission.env}
