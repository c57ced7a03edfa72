"""Doing it: each kind of fault, to this process or to its node, with nothing pretended."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torsh_distributed.elastic.faults.fault import Fault, FaultKind
from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument

EXIT_CODE = 17
_FULL_AT_BYTES = 4096
"""Files stop growing here: small ones, such as those through which ranks meet, still work as on a disk with a rest."""


class InjectedFault(Exception):
    """Raised by a fault of kind `raise`."""


def inflict(fault: Fault, *, newest_checkpoint: Path | None = None) -> None:
    """Do what the fault says, now or `after_s` from a thread. Returns if the process survives it."""
    if fault.after_s is not None:
        late = threading.Timer(fault.after_s, _act, (fault, newest_checkpoint))
        late.daemon = True
        late.start()
        return
    _act(fault, newest_checkpoint)


def _act(fault: Fault, newest_checkpoint: Path | None) -> None:
    match fault.kind:
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.STOP:
            _stop_self(fault.seconds)
        case FaultKind.EXIT:
            sys.exit(EXIT_CODE)
        case FaultKind.SEGFAULT:
            ctypes.string_at(0)
        case FaultKind.RAISE:
            raise InjectedFault(str(fault))
        case FaultKind.OUT_OF_MEMORY:
            import torch

            raise torch.OutOfMemoryError(str(fault))
        case FaultKind.DELAY | FaultKind.SLOW:
            assert fault.seconds is not None, "checked when the fault was made"
            time.sleep(fault.seconds)
        case FaultKind.LOCK_GIL:
            assert fault.seconds is not None, "checked when the fault was made"
            # PyDLL, unlike CDLL, keeps the lock during the call.
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(fault.seconds * 1e6)))
        case FaultKind.LINK_DOWN | FaultKind.SLOW_LINK:
            _harm_link(fault)
        case FaultKind.DISK_FULL:
            _fill_disk(fault.seconds)
        case FaultKind.FLIP_BYTE:
            flip_byte(_file_to_flip(fault, newest_checkpoint))


def _stop_self(seconds: float | None) -> None:
    if seconds is None:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    # A stopped process cannot wake itself. The helper starts counting when it sees the stop.
    wake = (
        f'while ! grep -q "^State:.T" /proc/{os.getpid()}/status; do sleep 0.01; done; '
        f"sleep {seconds:f}; kill -CONT {os.getpid()}"
    )
    with subprocess.Popen(["sh", "-c", wake]):
        os.kill(os.getpid(), signal.SIGSTOP)


def _harm_link(fault: Fault) -> None:
    """Take an interface down or limit it; a helper process undoes it, because this one may be stuck by then."""
    assert fault.target is not None, "checked when the fault was made"
    name = fault.target
    if fault.kind is FaultKind.LINK_DOWN:
        harm, undo = ["ip", "link", "set", "dev", name, "down"], f"ip link set dev {name} up"
    else:
        assert fault.rate_gbps is not None, "checked when the fault was made"
        kbit = max(8, int(fault.rate_gbps * 1e6))
        limit = ["rate", f"{kbit}kbit", "burst", "64kb", "latency", "50ms"]
        harm, undo = ["tc", "qdisc", "replace", "dev", name, "root", "tbf", *limit], f"tc qdisc del dev {name} root"
    if not name.replace("-", "").replace(".", "").replace("_", "").isalnum():
        raise InvalidArgument("that is not the name of an interface", target=name)
    try:
        done = subprocess.run(harm, capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        raise FeatureNotAvailable(f"`{' '.join(harm)}`: {error}", hint="install iproute2") from error
    if done.returncode:
        raise FeatureNotAvailable(
            f"`{' '.join(harm)}` says: {done.stderr.strip() or done.returncode}",
            hint="faults of links need root and an interface of this network namespace",
        )
    if fault.seconds is not None:
        subprocess.Popen(["sh", "-c", f"sleep {fault.seconds:f}; {undo}"], start_new_session=True)


def _fill_disk(seconds: float | None) -> None:
    """Let no file of this process grow beyond a page: writes fail as on a full disk, with EFBIG in place of ENOSPC.

    Python ignores the signal that the kernel sends with it.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_AT_BYTES, before[1]))
    if seconds is not None:
        _later(seconds, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before))


def _later(seconds: float, action: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def flip_byte(path: Path, *, offset: int | None = None) -> int:
    """Invert a byte of a file, a random one unless told; returns where."""
    size = path.stat().st_size
    if size == 0:
        raise InvalidArgument("the file is empty", path=str(path))
    place = random.randrange(size) if offset is None else offset
    with path.open("r+b") as file:
        file.seek(place)
        old = file.read(1)[0]
        file.seek(place)
        file.write(bytes([old ^ 0xFF]))
    return place


def _file_to_flip(fault: Fault, newest_checkpoint: Path | None) -> Path:
    if fault.target is not None:
        return Path(fault.target)
    if newest_checkpoint is None:
        raise InvalidArgument(
            "no checkpoint was saved yet whose byte could be flipped", hint="add `on FILE`", fault=str(fault)
        )
    # The largest file holds the tensors.
    return max((one for one in newest_checkpoint.iterdir() if one.is_file()), key=lambda one: one.stat().st_size)
