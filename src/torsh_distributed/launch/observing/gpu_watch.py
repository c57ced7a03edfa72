"""GPUs that report errors after which nothing should be started on them: uncorrected ECC errors, XIDs, a lost GPU.

A thread asks NVIDIA's driver library, by NVIDIA's package for it, because a call to a GPU that fails may take seconds.
XIDs that a program causes by itself, such as a wrong address, say nothing about the GPU and are left out.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Self

from torsh_distributed.errors import FeatureNotAvailable
from torsh_distributed.observe.metrics.energy_counters import chosen_gpus
from torsh_distributed.observe.metrics.gpu_sensors import answer_of, open_gpus

_log = logging.getLogger(__name__)
_ASK_EVERY_S = 1.0
_CLOSE_S = 2.0

_OF_PROGRAMS = frozenset({13, 31, 43, 45, 66, 68, 69, 109})
"""XIDs of a program's own errors or of its end, by NVIDIA's list of XIDs."""
_WORDS = {
    48: "an ECC error of two bits",
    63: "a part of its memory is to be retired",
    64: "a part of its memory could not be retired",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    94: "a contained ECC error",
    95: "an ECC error that is not contained",
    119: "its system processor does not answer",
    120: "its system processor failed",
}


@dataclass(frozen=True)
class GpuFault:
    """What a GPU reported."""

    uuid: str
    gpu: str
    """Its number in the driver and its name."""
    reason: str

    @property
    def text(self) -> str:
        """In one line."""
        return f"{self.gpu} ({self.uuid}) reports {self.reason}"


def xid_reason(xid: int) -> str | None:
    """What an XID says about the GPU; None if it is a program's own error."""
    if xid in _OF_PROGRAMS:
        return None
    return f"XID {xid}" + (f": {_WORDS[xid]}" if xid in _WORDS else "")


class _Gpu:
    """One GPU. Every call may raise NVMLError."""

    def __init__(self, index: int, handle: Any) -> None:
        import pynvml as nvml

        self._handle = handle
        self.uuid = str(answer_of(nvml.nvmlDeviceGetUUID, handle) or "")
        self._gpu = f"GPU {index} {answer_of(nvml.nvmlDeviceGetName, handle) or ''}".rstrip()
        self._uncorrected = self._count()
        self._events = self._register()

    def _register(self) -> Any:
        """A set of events of this GPU alone; None where it has none."""
        import pynvml as nvml

        kinds = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        supported = answer_of(nvml.nvmlDeviceGetSupportedEventTypes, self._handle) or 0
        if not kinds & supported:
            return None
        try:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, kinds & supported, events)
        except nvml.NVMLError as error:
            _log.info("%s tells no events: %s", self._gpu, error)
            return None
        return events

    def _count(self) -> int | None:
        import pynvml as nvml

        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        count: int | None = answer_of(nvml.nvmlDeviceGetTotalEccErrors, self._handle, uncorrected, volatile)
        return count

    def look(self) -> GpuFault | None:
        """What it has reported since the last look."""
        reason = self._lost() or self._event() or self._more_errors()
        return None if reason is None else GpuFault(self.uuid, self._gpu, reason)

    def _lost(self) -> str | None:
        import pynvml as nvml

        try:
            nvml.nvmlDeviceGetUUID(self._handle)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return "nothing any more: the driver has lost it"
        return None

    def _event(self) -> str | None:
        import pynvml as nvml

        while self._events is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError:  # a timeout: there is none
                return None
            if event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
                return "an ECC error of two bits"
            reason = xid_reason(int(event.eventData))
            if reason is not None:
                return reason
        return None

    def _more_errors(self) -> str | None:
        """Errors that were there when the watch began are of an earlier job."""
        count = self._count()
        before, self._uncorrected = self._uncorrected, count
        if count is None or before is None or count <= before:
            return None
        return f"{count - before} ECC errors that its memory could not correct"


class GpuWatch:
    """Watches the GPUs that `visible` names, as CUDA_VISIBLE_DEVICES does, while it is open; all if it is None.

    `reports` is readable when `take` has something.
    """

    def __init__(self, visible: str | None, *, every_s: float = _ASK_EVERY_S) -> None:
        self._visible = visible
        self._every_s = every_s
        self._found: SimpleQueue[GpuFault] = SimpleQueue()
        self.reports = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.uuids: tuple[str, ...] = ()
        """In the order in which workers number them; set once the driver was asked."""
        self._closing = False
        self._wake = threading.Condition()
        self._num_wanted = 0
        self._num_done = 0
        self._num_late = 0
        """Rounds after which an answer that took too long has come."""
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="torsh-gpu-watch", daemon=True)
        self._thread.start()

    def take(self) -> list[GpuFault]:
        """What was found since the last call."""
        found = []
        with suppress(BlockingIOError):
            os.eventfd_read(self.reports)
        try:
            while True:
                found.append(self._found.get_nowait())
        except Empty:
            return found

    def look_now(self, timeout_s: float) -> None:
        """Ask every GPU, and wait for all answers, but no longer than `timeout_s`; not while an earlier call waits."""
        with self._wake:
            if self._num_done < self._num_late:
                return
            # A round that is under way may have passed the GPU that fails now: the next one counts.
            self._num_wanted = wanted = self._num_done + 2
            self._wake.notify_all()
            if not self._wake.wait_for(lambda: self._num_done >= wanted or self._has_ended, timeout_s):
                self._num_late = wanted

    def _run(self) -> None:
        try:
            gpus = self._open()
            while gpus and not self._closing:
                for gpu in gpus:
                    fault = gpu.look()
                    if fault is not None:
                        self._report(fault)
                self._pause()
        except FeatureNotAvailable as error:
            _log.info("GPUs are not watched for errors: %s", error)
        except Exception:
            _log.exception("GPUs are not watched for errors any more")
        finally:
            with self._wake:
                self._has_ended = True
                self._wake.notify_all()

    def _report(self, fault: GpuFault) -> None:
        with self._wake:
            if not self._closing:  # afterwards the descriptor is closed, and may be another file's
                self._found.put(fault)
                os.eventfd_write(self.reports, 1)

    def _open(self) -> list[_Gpu]:
        if self._visible is not None and not self._visible.strip():
            return []  # hidden from the workers
        handles = open_gpus()
        if not handles:
            return []
        chosen = chosen_gpus(handles, self._visible)
        gpus = [_Gpu(index, handles[index]) for index in chosen]
        if "MIG-" in (self._visible or "") or not all(gpu.uuid for gpu in gpus):
            return []  # slices of GPUs cannot be told apart
        self.uuids = tuple(gpu.uuid for gpu in gpus)
        return gpus

    def _pause(self) -> None:
        with self._wake:
            self._num_done += 1
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._closing or self._num_done < self._num_wanted, self._every_s)

    def close(self) -> None:
        """Stop asking."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(timeout=_CLOSE_S)
        os.close(self.reports)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
