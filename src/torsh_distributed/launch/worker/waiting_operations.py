"""What this process waits for: seen from outside, once a second, at no cost to a collective.

The flight recorder keeps what is under way, and a thread's stack shows whether it waits for it. Loaded by path before
this package is imported, so it imports only the standard library; the recorder is found once it is loaded.

Threads: `look` and the answers to the launcher run on the line's thread, while the threads that they look at go on;
`history` and the last `status` on the thread that raised or ends. No lock of others is taken here, because a thread
that is stuck may hold it. So everything that others change is copied in one call first (`list(recorder)`,
`frames_now`), and may be out of date by the next line: a frame may have returned, an operation ended. At worst one look
is wrong; a wait is told of after `_SHORTEST_WAIT_S`, which is longer than the pause between two looks.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torsh_distributed.launch.worker.raised_error import (
    folded,
    is_library,
    is_transport_text,
    own_line,
    places_of,
    user_line,
)
from torsh_distributed.launch.worker.torch_flight_recorder import torch_records

_RECORDER = "torsh_distributed.comm.recording.flight_recorder"
_C10D = "torch.distributed.distributed_c10d"
_OUR_COMM = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "comm") + os.sep  # noqa: PTH100, PTH118, PTH120
_MEETING = _OUR_COMM + "meeting" + os.sep
_TORCH_COMM = f"{os.sep}torch{os.sep}distributed{os.sep}"
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120
_POLL_S = 1.0
_SHORTEST_WAIT_S = 2.0
_FIRST_WAIT_S = 5.0
_TIMES_USUAL = 10.0
_MAX_RECORDS = 32
_MAX_GROUPS = 8
_MAX_STACK_LINES = 24
_MAX_THREADS = 6
_BY_TORCH = " (by torch)"
_BACKWARD = "_engine_run_backward"


_collection = threading.RLock()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage in here.

    `sys._current_frames` and `_current_exceptions` make objects while they hold the lock of Python's list of threads.
    If that starts a collection, and a `threading.local` that dies in it asks for the same lock, the process
    hangs with the GIL held (python/cpython#106883, seen on 3.11): no thread of it ever runs again.
    """
    # Two threads must not take each other's switch for the user's. A fork may have left the lock held: then the risk of
    # a collection is smaller than that of waiting.
    is_mine = _collection.acquire(timeout=1.0)
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
        if is_mine:
            _collection.release()


def frames_now() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the thread's number."""
    with _no_collection():
        return sys._current_frames()


class OperationWatch:
    """Looks at this process from the line's thread; remembers since when it waits."""

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = ()
        self._seen_s = time.monotonic()
        self._since_s: float | None = None
        self._last_look_s = self._seen_s
        self._told_s = 0.0

    def look(self) -> tuple[dict[str, Any] | None, float]:
        """A status to send if this process waits longer than usual, and the seconds until the next look."""
        if _C10D not in sys.modules:
            return None, _POLL_S
        blocked = self._blocked()
        if blocked is None:
            return None, _POLL_S
        limit_s = max(_limit_s(blocked), 2 * self._told_s)
        if blocked["age_s"] >= limit_s:
            self._told_s = blocked["age_s"]
            return self.status(), _POLL_S
        return None, min(_POLL_S, max(0.05, limit_s - blocked["age_s"]))

    def status(self) -> dict[str, Any]:
        """What this process does now: what it waits for, its latest operations by group, its stack."""
        blocked = self._blocked() if _C10D in sys.modules else None
        return {
            "blocked": blocked,
            "groups": _latest_operations(),
            "stack": stack_of_main(),
            "handling": _exception_in_hand(),
            "threads": _other_threads(),
        }

    def history(self, error: BaseException) -> dict[str, Any]:
        """What goes with a report of `error`: the latest operations, and which of them it failed in."""
        told: dict[str, Any] = {"groups": _latest_operations()}
        # Of gloo and nccl, torch's own recorder knows which of several is the one that has not ended.
        under_way = next((one for one in torch_records() if not one.is_ended), None)
        newest = next(reversed(list(_recorder() or ())), under_way)
        is_of_call = "CommunicationError" in {kind.__name__ for kind in type(error).__mro__} or is_transport_text(
            str(error)
        )
        if newest is not None and is_of_call:
            told.update(operation=newest.op, sequence=newest.sequence)
        return told

    def _blocked(self) -> dict[str, Any] | None:
        now_s = time.monotonic()
        before_s, self._last_look_s = self._last_look_s, now_s
        found = _waiting_frame() or _backward_frame()
        if found is None:
            self._seen, self._since_s, self._told_s = (), None, 0.0
            return None
        frame, entry, user = found
        record = _record_under_way(frame) or _torch_record_under_way()
        if record is None and not _is_comm(entry):
            return None  # a backward pass that waits for nobody
        # A loop over the same call reuses the frame's memory; the newest operation tells its rounds apart.
        seen = (id(entry), entry.f_lasti, id(user), user.f_lasti if user else 0, _progress())
        if seen != self._seen:
            self._seen, self._told_s = seen, 0.0
            # The look before did not see it, so it began since.
            self._since_s = max(before_s, record["start_s"]) if record is not None else before_s
        assert self._since_s is not None, "set with what is seen"
        at = own_line(places_of(user)) if user is not None else None
        told: dict[str, Any] = {"age_s": now_s - self._since_s, "usual_s": None, "at": at, **_call_by_stack(entry)}
        told["peer"] = _peer_by_stack(frame)
        if record is not None:
            told.update({name: value for name, value in record.items() if name != "start_s"})
        return told


def _limit_s(blocked: dict[str, Any]) -> float:
    """From when on a wait is worth a word."""
    usual_s = blocked["usual_s"]
    return _FIRST_WAIT_S if usual_s is None else max(_SHORTEST_WAIT_S, _TIMES_USUAL * usual_s)


def _waiting_frame() -> tuple[FrameType, FrameType, FrameType | None] | None:
    """The frame of a thread that waits in a communication call, the call that entered it, and the caller's frame.

    A thread of the backends' own has no caller outside them: it serves, it does not wait.
    """
    for number, innermost in frames_now().items():
        if number == threading.get_ident():
            continue
        frame: FrameType | None = innermost
        while frame is not None and frame.f_code.co_filename.startswith(_STANDARD) and not _is_comm(frame):
            frame = frame.f_back
        if frame is None or not _is_comm(frame):
            continue
        waiting = entry = frame
        while entry.f_back is not None and (_is_comm(entry.f_back) or _is_wrapper(entry.f_back)):
            entry = entry.f_back
        user = entry.f_back
        while user is not None and is_library(user.f_code.co_filename):
            user = user.f_back
        if user is not None or number == threading.main_thread().ident:
            return waiting, entry, user
    return None


def _backward_frame() -> tuple[FrameType, FrameType, FrameType | None] | None:
    """The main thread inside torch's backward pass, where C++ waits for gradients that other ranks have to send."""
    frame = frames_now().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_name != _BACKWARD:
        return None
    user: FrameType | None = frame
    while user is not None and is_library(user.f_code.co_filename):
        user = user.f_back
    return frame, frame, user


def _is_comm(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_OUR_COMM) or _TORCH_COMM in name


def _is_wrapper(frame: FrameType) -> bool:
    """A context manager or decorator of the standard library or of typing_extensions between two of our calls."""
    name = frame.f_code.co_filename
    back = frame.f_back
    return (name.startswith(_STANDARD) or name.endswith("typing_extensions.py")) and back is not None and _is_comm(back)


def _call_by_stack(entry: FrameType) -> dict[str, Any]:
    """What the stack alone tells about a call; the recorder knows more, if it was recorded."""
    name = entry.f_code.co_filename
    back = entry
    op = entry.f_code.co_name
    if name.startswith(_MEETING) or op in ("start_world", "init_process_group", "_bring_up", "init"):
        op = "init"
    elif op == "wrapper":
        op = str(back.f_locals.get("func_name") or getattr(back.f_locals.get("func"), "__name__", op))
    return {"op": op, "group": None, "sequence": None, "num_bytes": None, "members": None, "is_world": True}


def _peer_by_stack(frame: FrameType | None) -> int | None:
    """The rank of the world that torch's `send` or `recv` on the stack is about; gloo's are in no recorder."""
    while frame is not None and _is_comm(frame):
        name = {"recv": "src", "irecv": "src", "send": "dst", "isend": "dst"}.get(frame.f_code.co_name)
        if name is not None and isinstance(frame.f_locals.get(name), int):
            return int(frame.f_locals[name])
        frame = frame.f_back
    return None


def _record_under_way(frame: FrameType) -> dict[str, Any] | None:
    """The oldest operation of the recorder that has not ended; a brief one if the stack is inside the short path."""
    recorder = _recorder()
    if recorder is None:
        return None
    records = list(recorder)
    if not records:
        return None
    found = next((one for one in records if not one.is_brief and one.end_s is None and one.peer is None), None)
    newest = records[-1]
    if newest.is_brief and _is_in_short_path(frame):
        found = newest
    if found is None:
        found = next((one for one in records if not one.is_brief and one.end_s is None), None)
    if found is None:
        return None
    took = [
        one.end_s - one.start_s
        for one in records
        if not one.is_brief and one.end_s is not None and one.op == found.op and _key(one) == _key(found)
    ]
    usual_s = sorted(took)[int(0.9 * (len(took) - 1))] if took else None
    if found.is_brief and usual_s is None and sum(one.is_brief for one in records) > 1:
        usual_s = 0.0  # those before ended within a look
    members, is_world = _members(found.group)
    return {
        "op": found.op,
        "group": _key(found),
        "sequence": found.sequence,
        "num_bytes": found.num_bytes,
        "members": members,
        "is_world": is_world,
        "peer": found.peer,
        "usual_s": usual_s,
        "start_s": 0.0 if found.is_brief else found.start_s,
    }


def _torch_record_under_way() -> dict[str, Any] | None:
    """The oldest operation of a gloo or nccl group that has not ended, from torch's own flight recorder."""
    records = torch_records()
    found = next((one for one in records if not one.is_ended), None)
    if found is None:
        return None
    members, is_world = _members(found.group)
    return {
        "op": found.op,
        "group": found.group + _BY_TORCH,
        "sequence": found.sequence,
        "num_bytes": found.num_bytes,
        "members": members,
        "is_world": is_world,
        "peer": found.peer,
        "usual_s": 0.0 if any(one.is_ended and one.op == found.op for one in records) else None,
        "start_s": time.monotonic() - found.age_s,
    }


def _is_in_short_path(frame: FrameType | None) -> bool:
    while frame is not None and _is_comm(frame):
        if frame.f_code.co_name == "_run_at_once":
            return True
        frame = frame.f_back
    return False


def _recorder() -> Any:
    return getattr(sys.modules.get(_RECORDER), "recorder", None)


def _progress() -> Any:
    """Changes with every operation: the recorder's newest, and the numbers that torch's groups count."""
    recorder = _recorder()
    newest = recorder.newest if recorder is not None else None
    numbers = []
    for group in _groups():
        try:
            numbers.append(group._get_sequence_number_for_group())
        except RuntimeError:  # a backend that does not count
            continue
    return newest if newest is None else id(newest), tuple(numbers)


def _groups() -> list[Any]:
    """torch's process groups of this process."""
    world = getattr(sys.modules.get(_C10D), "_world", None)
    try:
        return [] if world is None else list(world.pg_names)
    except RuntimeError:  # a group was made at this moment
        return []


# Kept for groups that were destroyed: their last operations are what a report is about.
_known: dict[str, tuple[list[int] | None, bool]] = {}


def _members(name: str) -> tuple[list[int] | None, bool]:
    """The ranks of the world in the group of that name, and whether it is the world itself."""
    world = getattr(sys.modules.get(_C10D), "_world", None)
    for group in _groups():
        known = world.pg_names.get(group) if world is not None else None
        if world is not None and known is not None:
            _known[known] = sorted(world.pg_group_ranks.get(group, {})), group is world.default_pg
    return _known.get(name, (None, False))


def _latest_operations() -> dict[str, Any]:
    """By group: its members and the latest operations, as (number, operation, bytes, peer, call site, ended)."""
    recorder = _recorder()
    by_group: dict[str, list[Any]] = {}
    for record in reversed(list(recorder or ())):
        kept = by_group.setdefault(_key(record), [])
        if len(kept) < _MAX_RECORDS:
            ended = record.is_brief or record.end_s is not None
            site = record.call_site
            kept.append([record.sequence, record.op, record.num_bytes, record.peer, _short(site), ended])
    for one in reversed(torch_records()):
        kept = by_group.setdefault(one.group + _BY_TORCH, [])
        if len(kept) < _MAX_RECORDS:
            kept.append([one.sequence, one.op, one.num_bytes, one.peer, None, one.is_ended])
    found = {}
    for name in list(by_group)[:_MAX_GROUPS]:
        members, is_world = _members(name.removesuffix(_BY_TORCH))
        found[name] = {"members": members, "is_world": is_world, "records": by_group[name][::-1]}
    return found


def _key(record: Any) -> str:
    """The group whose numbers a record counts in: calls of torch's are numbered apart from those of this library."""
    return str(record.group) + (_BY_TORCH if record.is_by_torch else "")


def _short(site: str | None) -> str | None:
    if site is None:
        return None
    file, _, line = site.rpartition(":")
    return f"{os.path.basename(file)}:{line}"  # noqa: PTH119


def stack_of_main() -> list[str]:
    """Where the main thread is, outermost first, library frames folded."""
    frame = frames_now().get(threading.main_thread().ident or 0)
    return folded(places_of(frame))[-_MAX_STACK_LINES:]


def _exception_in_hand() -> str | None:
    """`ValueError: bad batch (train.py:12 in step)`: the exception in whose `except` block the main thread is."""
    with _no_collection():
        found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # Python 3.11 gives (type, value, traceback)
    if not isinstance(error, BaseException):
        return None
    place = user_line(error)
    return f"{type(error).__name__}: {str(error)[:200]}" + (f" ({place})" if place else "")


def _other_threads() -> list[str]:
    """`loader: data.py:40 in fetch`: where the user's other threads are; those of libraries alone are left out."""
    found = []
    frames = frames_now()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is threading.main_thread() or thread.ident == threading.get_ident() or frame is None:
            continue
        places = places_of(frame)
        if any(not is_library(file) for file, _, _ in places):
            found.append(f"{thread.name}: {own_line(places)}")
    return found[:_MAX_THREADS]
