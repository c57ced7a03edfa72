"""A raised exception as plain values for the launcher: the user's own line, a folded traceback, whom it points to.

Loaded by path before the user's script, and before this package is imported, so it imports only the standard library
and knows the errors of this library and of torch by name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

MAX_TEXT_CHARS = 4_000
_MAX_FULL_CHARS = 24_000
_MAX_FOLDED_LINES = 60
_MAX_FRAMES = 200
_MAX_CHAIN = 8
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120 - pathlib is slow to import
_STANDARD = os.path.dirname(os.__file__)  # noqa: PTH120
_STARTS = frozenset(
    (
        "<frozen runpy>",
        *(os.path.join(_OURS, "launch", "worker", name) for name in ("worker_start.py", "spare.py")),  # noqa: PTH118
    )
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# What gloo, c10d's stores and NCCL say when the other end is gone or late; all raise RuntimeError or a kind of it.
_TRANSPORT = re.compile(r"gloo|c10d|TCPStore|NCCL|ProcessGroup|recvBytes|sendBytes")
_PEER_GONE = re.compile(
    r"closed|reset by peer|refused|broken pipe|time[d ]? ?out|timeout|remote process|got 0 bytes|end of file|aborted",
    re.IGNORECASE,
)
_TORCH_ERRORS = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")  # noqa: PTH118
_PEER_FACTS = ("failed_rank", "peer", "origin")

Place = tuple[str, int, str]
"""File, line and function of a frame."""


_MAX_SUB_EXCEPTIONS = 5


def describe_error(error: BaseException, *, how: str) -> dict[str, Any]:
    """Everything the launcher needs to know about an exception; `how` says where it was seen.

    `uncaught`: it left the script; `exit`: the script called sys.exit while handling it; `leaving`: a group was
    destroyed while it was in flight; `thread`: it ended a thread.
    """
    import traceback

    own = own_error(error)
    is_consequence, peers = points_to(error)
    context = getattr(own, "context", None)
    facts = context if isinstance(context, dict) else {}
    full = "".join(traceback.format_exception(without_start(error)))
    if len(full) > _MAX_FULL_CHARS:
        full = full[: _MAX_FULL_CHARS // 4] + "\n…\n" + full[-3 * _MAX_FULL_CHARS // 4 :]
    return {
        "how": how,
        "kind": type(own).__name__,
        "message": _text(own)[:MAX_TEXT_CHARS],
        "where": user_line(own),
        "traceback": folded_traceback(own),
        "full": full,
        "is_consequence": is_consequence,
        "peers": sorted(peers),
        "operation": facts.get("operation") if isinstance(facts.get("operation"), str) else _c10d_call(own),
        "sequence": facts.get("sequence") if isinstance(facts.get("sequence"), int) else None,
    }


def own_error(error: BaseException) -> BaseException:
    """The exception to report: the one raised, unless it only came up while another was on its way.

    `finally: barrier()` after a ValueError raises an error about the other ranks; the ValueError is the cause.
    """
    found = error
    for _ in range(_MAX_CHAIN):
        context = found.__context__ if found.__cause__ is None and not found.__suppress_context__ else None
        if context is None or not (is_about_peers(found) or isinstance(found, SystemExit)):
            break
        found = context
    # Python 3.11 makes a RuntimeError of what interrupts the making of a class; an import makes hundreds.
    return found.__cause__ if isinstance(found.__cause__, KeyboardInterrupt) else found


def points_to(error: BaseException) -> tuple[bool, set[int]]:
    """Whether the error follows from something on another rank, and which ranks it names."""
    own = own_error(error)
    chain: list[BaseException] = [own]
    while len(chain) < _MAX_CHAIN:
        last = chain[-1]
        inner = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if inner is None:
            break
        chain.append(inner)
    about_peers = [one for one in chain if is_about_peers(one)]
    named = {rank for one in about_peers for rank in _named_ranks(one)}
    return bool(about_peers), named


def is_about_peers(error: BaseException) -> bool:
    """Whether the exception says that another rank is gone, late or at fault."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "TorshError" in names:
        facts = getattr(error, "context", {})
        if "NonFiniteLoss" in names:
            return bool(facts.get("ranks")) and facts.get("rank") not in facts["ranks"]
        return "CommunicationError" in names
    if names & _TORCH_ERRORS:
        return True
    return isinstance(error, RuntimeError) and is_transport_text(str(error))


def is_transport_text(text: str) -> bool:
    """Whether a text is what gloo, c10d or NCCL say when a peer is gone or late."""
    return bool(_TRANSPORT.search(text) and _PEER_GONE.search(text))


def _named_ranks(error: BaseException) -> Iterator[int]:
    """The ranks of the world that one of our errors names, never the one that raised it."""
    world_peers = getattr(error, "world_peers", ())
    if world_peers:
        yield from world_peers
        return
    facts = getattr(error, "context", None)
    if not isinstance(facts, dict):
        return
    named = [facts.get(name) for name in _PEER_FACTS]
    named += list(facts.get("missing_ranks") or ())
    if "NonFiniteLoss" in {kind.__name__ for kind in type(error).__mro__}:
        named += list(facts.get("ranks") or ())
    elif type(error).__name__ == "ProcessFailure" and "failed_rank" not in facts and "sequence" not in facts:
        named.append(facts.get("rank"))
    me = os.environ.get("RANK")
    yield from (rank for rank in named if isinstance(rank, int) and rank >= 0 and str(rank) != me)


def _c10d_call(error: BaseException) -> str | None:
    """The collective of torch that the error came out of, such as `all_reduce`: its own backends do not say."""
    if not is_about_peers(error):
        return None
    calls = [function for file, _, function in _places(error.__traceback__) if file.endswith(_C10D)]
    return next((name for name in reversed(calls) if not name.startswith("_")), None)


def user_line(error: BaseException) -> str | None:
    """`train.py:42 in step`: the innermost line of the user's own code; of a library if none is the user's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown_path(error.filename)}:{error.lineno}"
    return own_line(list(_places(error.__traceback__)))


def own_line(places: list[Place]) -> str | None:
    """The innermost place outside libraries, or else the innermost of all."""
    place = next((place for place in reversed(places) if not is_library(place[0])), places[-1] if places else None)
    if place is None:
        return None
    file, line, function = place
    return f"{shown_path(file)}:{line}" + ("" if function == "<module>" else f" in {function}")


def _places(trace: TracebackType | None) -> Iterator[Place]:
    count = 0
    while trace is not None and count < _MAX_FRAMES:
        code = trace.tb_frame.f_code
        if not is_start(code.co_filename):
            yield code.co_filename, trace.tb_lineno, code.co_name
            count += 1
        trace = trace.tb_next


def places_of(frame: FrameType | None) -> list[Place]:
    """The stack of a frame, outermost first."""
    found: list[Place] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        if not is_start(frame.f_code.co_filename):
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def folded_traceback(error: BaseException) -> list[str]:
    """The traceback with runs of library frames as one line each; causes come first, as Python prints them."""
    lines: list[str] = []
    one: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if one is None:
            break
        part = [*folded(_places(one.__traceback__)), *_last_lines(one), *_sub_exceptions(one)]
        lines = [*part, "which caused:", *lines] if lines else part
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    if len(lines) > _MAX_FOLDED_LINES:
        lines = [*lines[: _MAX_FOLDED_LINES // 3], "…", *lines[-2 * _MAX_FOLDED_LINES // 3 :]]
    return [line[:MAX_TEXT_CHARS] for line in lines]


def _sub_exceptions(error: BaseException) -> list[str]:
    """What a group of exceptions holds, each with its own traceback; the group's text says only how many there are."""
    if not isinstance(error, BaseExceptionGroup):
        return []
    lines: list[str] = []
    for number, one in enumerate(error.exceptions[:_MAX_SUB_EXCEPTIONS], 1):
        lines += [f"  sub-exception {number} of {len(error.exceptions)}:"]
        lines += [f"    {line}" for line in folded_traceback(one)]
    return lines


def folded(places: Iterable[Place]) -> list[str]:
    """Frames as Python prints them, outermost first, with runs of library frames as one line each."""
    import linecache

    lines: list[str] = []
    run: list[Place] = []

    def end_run() -> None:
        if run:
            file, line, function = run[-1]
            frames = f"{len(run)} frames in" if len(run) > 1 else "a frame in"
            lines.append(f"  … {frames} {_library_name(file)}, to {os.path.basename(file)}:{line} in {function}")  # noqa: PTH119
            run.clear()

    for place in places:
        file, line, function = place
        if is_library(file):
            run.append(place)
            continue
        end_run()
        lines.append(f'  File "{shown_path(file)}", line {line}, in {function}')
        source = linecache.getline(file, line).strip()
        if source:
            lines.append(f"    {source[:200]}")
    end_run()
    return lines


def _last_lines(error: BaseException) -> list[str]:
    import traceback

    return "".join(traceback.format_exception_only(error)).rstrip("\n").split("\n")[:20]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # a user's __str__ may do anything
        return f"its text cannot be shown: {type(problem).__name__}"


def is_library(file: str) -> bool:
    """Whether a file is part of Python, of an installed package or of this one."""
    if file.startswith(("<frozen", _OURS + os.sep)):
        return True
    return file.startswith(_STANDARD + os.sep) or any(part in file for part in _INSTALLED)


def communication_call(places: Iterable[Place]) -> str | None:
    """The outermost call of a stack into this library's communication or torch's."""
    comm = os.path.join(_OURS, "comm") + os.sep  # noqa: PTH118
    torch = f"{os.sep}torch{os.sep}distributed{os.sep}"
    names = (name for file, _, name in places if file.startswith(comm) or torch in file)
    return next((name for name in names if name != "wrapper"), None)


def is_start(file: str) -> bool:
    """Whether a file is one that starts the script: its frames are not part of the user's program."""
    return file in _STARTS


def without_start(error: BaseException) -> BaseException:
    """The exception without the outermost frames, which started the script."""
    trace = error.__traceback__
    while trace is not None and is_start(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _library_name(file: str) -> str:
    for part in _INSTALLED:
        if part in file:
            return file.rpartition(part)[2].partition(os.sep)[0].removesuffix(".py")
    return "torsh_distributed" if file.startswith(_OURS) else "Python"


def shown_path(file: str) -> str:
    """A path as short as it can be: relative to the current directory or to one of the import path."""
    for folder in (_current_directory(), *sys.path):
        if folder and file.startswith(folder.rstrip(os.sep) + os.sep):
            return file[len(folder.rstrip(os.sep)) + 1 :]
    return file


def _current_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # it was removed
        return ""
