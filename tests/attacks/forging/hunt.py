"""Reads thousands of forged files and says what went wrong: `python -m tests.attacks.forging.hunt --num 10000`.

Wrong is a file outside of the forged directory that was opened, as an audit hook sees it and, for libraries that open
files themselves, the kernel; a foreign exception; one of our errors without a message; a reader that does
not come back.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.attacks.forging import checkpoint_formats as ck
from tests.attacks.forging import run_formats as rf
from torsh_distributed.errors import TorshError

_MOST_S = 60
_IN_OPEN = 0x20


class Format(NamedTuple):
    """How to make a good one, to forge it, and to read it."""

    make: Callable[[Path], None]
    forge: Callable[[Path, random.Random, Path], None]
    read: Callable[[Path], Iterator[Callable[[], object]]]


FORMATS = {
    "checkpoint": Format(ck.make_checkpoint, ck.forge_checkpoint, ck.read_checkpoint),
    "compressed": Format(ck.make_compressed, ck.forge_checkpoint, ck.read_checkpoint),
    "deepspeed": Format(ck.make_deepspeed, ck.forge_deepspeed, ck.read_deepspeed),
    "dcp": Format(ck.make_dcp, ck.forge_dcp, ck.read_torch),
    "torch": Format(ck.make_torch_file, ck.forge_torch, ck.read_torch),
    "safetensors": Format(ck.make_safetensors, ck.forge_safetensors, ck.read_safetensors),
    "events": Format(rf.make_events, rf.forge_events, rf.read_events),
    "plans": Format(rf.make_plans, rf.forge_plans, rf.read_plans),
    "machine": Format(rf.make_machine, rf.forge_machine, rf.read_machine),
}


class OpenedFiles:
    """Which files this process opens outside of `allowed`, while `is_on`; it cannot be taken off again."""

    def __init__(self, allowed: list[Path]) -> None:
        self.found: set[str] = set()
        self.is_on = False
        self._allowed = tuple(str(path.resolve()) for path in allowed)
        self.here = ""
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self.is_on or not isinstance(arguments[0], str | bytes):
            return
        given, flags = Path(os.fsdecode(arguments[0])), arguments[2]
        # A link that is not followed is not opened.
        is_final = isinstance(flags, int) and flags & os.O_NOFOLLOW
        path = str(given.parent.resolve() / given.name) if is_final else os.path.realpath(given)
        if not path.startswith((self.here, *self._allowed)):
            self.found.add(path)


class PrivateFile:
    """A file that nobody may open, and who does, as the kernel reports it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("secret\n" * 1000)
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify")

    def num_opened(self) -> int:
        """How often it was opened since the last call."""
        try:
            return len(os.read(self._fd, 1 << 16)) // struct.calcsize("iIII")
        except BlockingIOError:
            return 0


def hunt(names: list[str], num: int, seed: int) -> dict[str, Any]:
    """Forge and read `num` files, in turns of the formats; what went wrong, by the seed of the file."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    outside: list[str] = []
    tracebacks: list[str] = []
    num_refused = dict.fromkeys(names, 0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        private = PrivateFile(root / "private.txt")
        good = {name: root / f"good-{name}" for name in names}
        for name in names:
            FORMATS[name].make(good[name])
            for read in FORMATS[name].read(good[name]):
                read()  # all that is imported late, and a good one is read
            shutil.rmtree(good[name])
            FORMATS[name].make(good[name])
        os.chdir(root)
        opened = OpenedFiles(_libraries())
        signal.signal(signal.SIGALRM, _give_up)
        for number in range(num):
            name, case = names[number % len(names)], root / f"case-{number}"
            shutil.copytree(good[name], case)
            FORMATS[name].forge(case, random.Random(seed * 1_000_003 + number), private.path)
            private.num_opened()
            opened.here = str(case)
            was_refused = False
            for reader in FORMATS[name].read(case):
                opened.is_on = True
                problem, refused = _tried(reader)
                opened.is_on = False
                was_refused = was_refused or refused
                if problem is not None:
                    tracebacks.append(f"{name} {seed}/{number}: {problem}")
            num_refused[name] += was_refused
            if private.num_opened() or opened.found:
                outside.append(f"{name} {seed}/{number}: {sorted(opened.found) or private.path}")
                opened.found.clear()
            shutil.rmtree(case)
        used_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {
        "num_files": num,
        "num_refused": num_refused,
        "opened_outside": outside,
        "tracebacks": tracebacks,
        "most_memory_mb": used_mb,
    }


def _tried(reader: Callable[[], object]) -> tuple[str | None, bool]:
    """What went wrong, and whether it was refused."""
    signal.alarm(_MOST_S)
    try:
        reader()
    except TorshError as error:
        return (None, True) if error.message.strip() else ("an error without a message", True)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception(error)[-6:]), True
    finally:
        signal.alarm(0)
    return None, False


def _give_up(number: int, frame: Any) -> None:
    raise TimeoutError(f"a reader did not come back within {_MOST_S} s")


def _libraries() -> list[Path]:
    """Where Python and its packages are, and what the system tells every process."""
    source = Path(__file__).parents[3] / "src"
    found = [Path(one) for one in (sys.prefix, sys.base_prefix, *sys.path) if one]
    return [*found, source, *map(Path, ("/proc", "/sys", "/dev", "/etc/localtime", "/usr/share/zoneinfo"))]


def main() -> None:
    """Print the report as JSON; exit status 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--formats", nargs="+", choices=sorted(FORMATS), default=sorted(FORMATS))
    given = parser.parse_args()
    report = hunt(given.formats, given.num, given.seed)
    print(json.dumps(report, indent=1))
    sys.exit(1 if report["opened_outside"] or report["tracebacks"] else 0)


if __name__ == "__main__":
    main()
