"""Why the missing rank is missing: the likely cause of a wait, read from that rank's stack and history. Pure.

Who is missing and where is known; why is a guess, made from what hangs usually come from, and called likely.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torsh_distributed.launch.causes.waits import WaitFinding
from torsh_distributed.launch.worker.native_state import NO_ANSWER
from torsh_distributed.launch.worker.rank_status import RankStatus, SeenOperation

CauseKind = Literal[
    "ended", "stopped", "storage", "native", "exception", "save", "input", "lock", "outside", "debugger", "sleep",
    "compute", "skipped", "branch", "shape", "deadlock", "message", "link", "unknown",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LikelyCause:
    """What is probably wrong, and what to do about it."""

    kind: CauseKind
    text: str
    advice: str

    @property
    def line(self) -> str:
        """Both in a line."""
        return f"{self.text}; {self.advice}"


# What the innermost frames of the missing rank show, first match first.
_BY_STACK: tuple[tuple[CauseKind, re.Pattern[str], str, str], ...] = (
    (
        "debugger",
        re.compile(r"\b(pdb|bdb|debugpy|ipdb)\b|\bbreakpoint\(|in set_trace|= input\(|^\s+input\("),
        "it waits for a person: a breakpoint or input()",
        "remove it, or answer on that rank's terminal",
    ),
    (
        "save",
        re.compile(r"\bsave\w*\(|in \w*save\w*|in \w*checkpoint\w*|serialization\.py|safetensors|fsync\(|in write_\w*"),
        "it saves while the others go on",
        "let every rank call the save, as engine.save() does, or let the others wait for it with a longer deadline",
    ),
    (
        "input",
        re.compile(r"dataloader\.py|\bnext\(|in __next__|in __getitem__|in __iter__|in \w*(load|fetch|batch)\w*\b"),
        "it waits for its next batch",
        "look at its loader: fewer or slower samples than the others, a dead loader process, a slow disk",
    ),
    (
        "lock",
        re.compile(r"threading\.py.* in (acquire|wait|join|_wait\w*)|\.acquire\(|^\s+with \w*lock|\.join\(\)"),
        "it waits for a lock or a thread of its own process",
        "look at the other threads below: the one that holds the lock does not give it back",
    ),
    (
        "outside",
        re.compile(r"socket\.py|ssl\.py|http/client|urllib|requests|subprocess\.py|selectors\.py|\burlopen\(|os\.read\("),
        "it waits for another program: a service, a download or a child process",
        "give that call a timeout, and do it on every rank or on none",
    ),
    (
        "sleep",
        re.compile(r"\bsleep\("),
        "it sleeps",
        "a retry with a growing delay, or a wait for a file that does not come",
    ),
)  # fmt: skip
_NUM_LINES = 6


def likely_cause(found: WaitFinding, statuses: Mapping[int, RankStatus], finished: set[int]) -> LikelyCause:
    """The likely cause of a wait that `explain_waits` has found."""
    dead = _of_dead_link(found, statuses)
    if dead is not None:
        return dead
    match found.kind:
        case "differ":
            return _of_difference(found, statuses)
        case "deadlock":
            return _of_deadlock(found)
        case "together":
            return _of_nobody_late(statuses)
    status = statuses.get(found.rank) if found.rank is not None else None
    if found.rank in finished:
        step = "" if status is None or status.step is None else f" after {status.step} steps"
        return LikelyCause(
            kind="ended",
            text=f"its script ended normally{step}, so its loop is shorter than the others'",
            advice="give every rank the same number of batches (drop_last, engine.batches), or leave the loop together",
        )
    return _of_missing(found, status) if status is not None else _UNKNOWN


_UNKNOWN = LikelyCause(kind="unknown", text="its state is not known", advice="look at its output")


def _of_missing(found: WaitFinding, status: RankStatus) -> LikelyCause:
    silent = _of_silence(status)
    if silent is not None:
        return silent
    if status.handling is not None:
        return LikelyCause(
            kind="exception",
            text=f"it is in an `except` block: {status.handling}",
            advice="an exception that one rank handles alone keeps it from the others: raise it, or let all ranks know",
        )
    by_stack = _of_stack(status.stack)
    if by_stack is not None:
        return by_stack
    if found.call is not None and found.call.peer is not None:
        return LikelyCause(
            kind="message",
            text=f"it does not make the other half of {found.call.op}",
            advice="every send needs a receive of the same size on the other rank, in the same order",
        )
    native = status.native or ""
    if native.startswith("runs") or "CPU" in native:
        return LikelyCause(
            kind="compute",
            text=f"it computes ({native})",
            advice="its work is longer than the others', or a loop on it does not end",
        )
    return LikelyCause(kind="unknown", text=f"it is elsewhere ({native or 'see its stack'})", advice="see its stack")


def _of_silence(status: RankStatus) -> LikelyCause | None:
    silence = status.silence or ""
    pid = status.pid if status.pid is not None else "PID"
    if "stopped" in silence:
        return LikelyCause(
            kind="stopped",
            text="its process is stopped (SIGSTOP, Ctrl-Z or a debugger)",
            advice=f"`kill -CONT {pid}` lets it go on",
        )
    if "uninterruptible" in silence:
        return LikelyCause(
            kind="storage",
            text="it waits for a disk or a network file system that does not answer",
            advice="look at the mount: the process cannot even be killed until it answers",
        )
    if "Python's lock" in silence:
        by_stack = _of_stack(status.stack)
        if by_stack is not None and by_stack.kind in ("save", "input"):
            return by_stack
        return LikelyCause(
            kind="native",
            text=f"native code on it holds Python's lock ({status.native or 'state not known'})",
            advice="an extension that keeps the lock blocks every thread of the process; its stack shows the call",
        )
    return None


def _of_stack(stack: Sequence[str]) -> LikelyCause | None:
    """By the innermost lines: the user's last frame, its source, and the library it is in."""
    last = "\n".join(stack[-_NUM_LINES:])
    for kind, pattern, text, advice in _BY_STACK:
        if any(pattern.search(line) for line in last.splitlines()):
            return LikelyCause(kind=kind, text=text, advice=advice)
    return None


def _of_difference(found: WaitFinding, statuses: Mapping[int, RankStatus]) -> LikelyCause:
    """One rank called something else under the same number: another size, one operation less, or one more."""
    status = statuses.get(found.rank) if found.rank is not None else None
    number, group = (found.call.sequence, found.call.group) if found.call is not None else (None, None)
    if status is None or number is None or group is None:
        return _SKIPPED
    if status.handling is not None:
        return _of_missing(found, status)
    odd = _operation(status, group, number)
    usual = next((one for rank in found.waiting if (one := _operation(statuses[rank], group, number))), None)
    before = [
        one
        for each in statuses.values()
        if group in each.groups
        for one in each.groups[group].operations
        if one.sequence < number
    ]
    if odd is None or usual is None:
        return _SKIPPED
    is_usual = any((one.op, one.num_bytes) == (odd.op, odd.num_bytes) and one.at == odd.at for one in before)
    # A rank that died in the call took its size along; it was on another line, though.
    is_unknown = odd.num_bytes < 0 and usual.at is None
    is_other_line = odd.num_bytes < 0 and odd.op == usual.op and odd.at != usual.at and not is_unknown
    if is_usual or is_other_line:
        return LikelyCause(
            kind="skipped",
            text=f"it skipped {usual.op}{_of_place(usual)}, or calls in another order",
            advice=_SKIPPED.advice,
        )
    is_same_line = odd.at == usual.at or odd.at is None or not before or _is_same_shape_site(odd, before)
    if odd.op == usual.op and (is_same_line or is_unknown):
        return LikelyCause(
            kind="shape",
            text=f"its {odd.op} has another size than the others' {usual.num_bytes} bytes"
            + (f": {odd.num_bytes}" if odd.num_bytes >= 0 else "")
            + (", or it skipped one before it" if is_unknown else ""),
            advice="shapes must be equal on all ranks: a smaller last batch, an unused parameter, another config",
        )
    is_save = any(re.search(r"save|checkpoint", line) for line in status.stack[-_NUM_LINES:])
    saving = "it saves, and the save" if is_save else "it"
    return LikelyCause(
        kind="save" if is_save else "branch",
        text=f"only {saving} calls {odd.op}{_of_place(odd)}: a branch such as `if rank == 0:` around a collective",
        advice="call collectives outside of branches that not all ranks take; engine.save() is called by all of them",
    )


_SKIPPED = LikelyCause(
    kind="skipped",
    text="it skipped an operation, or calls in another order",
    advice="a swallowed exception, a `continue`, or a condition that differs between ranks; TORSH_DEBUG=1 stops there",
)


def _is_same_shape_site(odd: SeenOperation, before: Sequence[SeenOperation]) -> bool:
    """Whether the rank calls from a line of its usual step: then only the size is unusual."""
    return any(one.at == odd.at and one.op == odd.op for one in before)


def _operation(status: RankStatus, group: str, number: int) -> SeenOperation | None:
    history = status.groups.get(group)
    return next((one for one in history.operations if one.sequence == number), None) if history is not None else None


def _of_place(one: SeenOperation) -> str:
    return f" at {one.at}" if one.at else ""


def _of_deadlock(found: WaitFinding) -> LikelyCause:
    if found.call is not None and found.call.peer is not None and found.rank not in found.waiting:
        return LikelyCause(
            kind="message",
            text=f"rank {found.rank} went on without its half of {found.call.op}",
            advice="every send needs a receive on the other rank, and the other way round, in the same order",
        )
    if found.call is not None and found.call.peer is not None:
        return LikelyCause(
            kind="message",
            text="ranks send or receive in a circle, and each waits for the other's first",
            advice="order them (even ranks send first), or use isend/irecv or batch_isend_irecv",
        )
    return LikelyCause(
        kind="deadlock",
        text="ranks use two groups in different orders, so each waits for one that waits",
        advice="call the collectives of different groups in the same order on every rank",
    )


def _of_dead_link(found: WaitFinding, statuses: Mapping[int, RankStatus]) -> LikelyCause | None:
    """Whether ranks sent what no machine acknowledges: that is a link, whoever seems to be late."""
    cut = {
        rank: status.native.partition(NO_ANSWER)[2].strip()
        for rank, status in sorted(statuses.items())
        if status.native is not None and NO_ANSWER in status.native and status.waiting is not None
    }
    if not cut or found.kind == "differ":
        return None
    rank, peer = next(iter(cut.items()))
    return LikelyCause(
        kind="link",
        text=f"the link is dead: what rank {rank} sent to {peer} is not acknowledged",
        advice="look at cable, firewall and machine at that address; `torsh bench network` measures the link",
    )


def _of_nobody_late(statuses: Mapping[int, RankStatus]) -> LikelyCause:
    nodes = {status.node_rank for status in statuses.values()}
    if len(nodes) > 1:
        return LikelyCause(
            kind="link",
            text="every rank has come and nothing moves: the link between the nodes, or a firewall",
            advice="`torsh bench network` measures it; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface",
        )
    return LikelyCause(
        kind="unknown",
        text="every rank has come: the operation is slow, not stuck",
        advice="give it time, or less data",
    )
