"""The record that a node makes of each worker that ends, well or not; every report is written from these."""

from __future__ import annotations

from dataclasses import dataclass

from torsh_distributed.launch.worker.rank_status import RaisedError, Text


@dataclass(frozen=True, kw_only=True)
class EndReport:
    """How a worker ended, or that a node was lost (then `rank` is None); one of them is the cause of the job's end."""

    node_rank: int
    node_name: Text
    rank: int | None = None
    pid: int | None = None
    exit_code: int = 1
    """For the shell: the worker's, or 128 + signal; 0 only for a worker that succeeded while others need it."""
    cause: Text
    evidence: Text | None = None
    """What proves the cause beyond the exit status, such as the kernel's count of out-of-memory kills."""
    memory_bytes: int | None = None
    """The most memory it held, if the kernel killed it because there was none left."""
    likely: Text | None = None
    """Why others waited for this rank in vain, as far as it can be guessed, and what to do about it."""
    raised: RaisedError | None = None
    """The exception that ended the worker."""
    is_consequence: bool = False
    """Whether all that is known says that another rank was at fault."""
    at_s: float = 0.0
    """Wall-clock time at which the worker failed."""
    ran_s: float | None = None
    step: int | None = None
    checkpoint_step: int | None = None
    last_lines: tuple[Text, ...] = ()
    """The end of the worker's stderr."""
    stack: tuple[Text, ...] = ()
    """Where the worker was, if it raised nothing: outermost first, library frames folded."""
    where: Text | None = None
    """The user's own line in `stack`."""
    call: Text | None = None
    """The communication call at the end of `stack`."""
    consequences: tuple[Text, ...] = ()
    """What the other ranks did meanwhile."""
    log: Text | None = None
    lacks_gpu: bool = False
    """Whether it was not started, because no sound GPU is left for it on that node."""
    finished_before: tuple[tuple[int, float], ...] = ()
    """(rank, seconds before the failure) of workers on that node that had succeeded while others went on."""
