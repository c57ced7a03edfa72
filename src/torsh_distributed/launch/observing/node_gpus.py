"""The GPUs of a node under its launcher: those that report errors get no new worker, and that is told."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from torsh_distributed.launch.local.end_report import EndReport
from torsh_distributed.launch.local.failure_report import LauncherOutput
from torsh_distributed.launch.local.loop import Loop
from torsh_distributed.launch.observing.gpu_places import GpuPlaces
from torsh_distributed.launch.spec import JobSpec

if TYPE_CHECKING:
    from torsh_distributed.events import IncidentStatus
    from torsh_distributed.launch.observing.gpu_watch import GpuFault, GpuWatch

_LOOK_S = 0.5
"""How long GPUs may take to answer: one that fails may take seconds, and the launcher's loop stands still."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_HINT = (
    "hint: the GPU needs a reset or a repair; start the job on other nodes or with fewer workers, or with "
    f"{VISIBLE}= if it does not use GPUs"
)


class NodeGpus:
    """Watches from the first workers on. `rank_of` gives the rank of a local rank that runs; `tell` takes events."""

    def __init__(
        self,
        spec: JobSpec,
        loop: Loop,
        output: LauncherOutput,
        *,
        rank_of: Callable[[int], int],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._spec, self._loop, self._output = spec, loop, output
        self._rank_of, self._tell = rank_of, tell
        self._watch: GpuWatch | None = None
        self._places: GpuPlaces | None = None
        self._faults: dict[str, GpuFault] = {}
        self._open_since: dict[str, tuple[float, int]] = {}
        """Incidents that are open: since when, and the rank on that GPU."""

    def start(self, environ: Mapping[str, str] | None = None) -> None:
        """Begin to watch; nothing happens where the node has no GPU, or no package to ask it."""
        if self._watch is None:
            # Imported here: the first worker does not wait for it.
            from torsh_distributed.launch.observing.gpu_watch import GpuWatch

            self._watch = GpuWatch({**(environ or os.environ), **self._spec.env}.get(VISIBLE))
            self._loop.watch(self._watch.reports, self._hear)

    def fault_of(self, local_rank: int) -> str | None:
        """What the GPU of a worker reported."""
        self._look()
        gpu = None if self._places is None else self._places.gpu_of(local_rank)
        return self._faults[gpu].text if gpu in self._faults else None

    def variables(self, starting: Collection[int], running: Collection[int]) -> dict[str, str] | None:
        """For workers that are about to be started, by local rank; None if there is no sound GPU for each of them."""
        self._look()
        if self._places is None or not self._faults:
            return {}
        if not self._places.make_room(starting, running):
            self._end_incidents("failed", "no GPU is left for its worker")
            return None
        self._end_incidents("resolved", "its worker was started on another GPU")
        visible = self._places.visible({*starting, *running})
        return {} if visible is None else {VISIBLE: visible}

    def shortage(self, num_workers: int, rank: int | None = None) -> EndReport:
        """Why workers cannot be started."""
        left = 0 if self._places is None else self._places.num_left()
        gpus = f"{left} GPU{'' if left == 1 else 's'} of this node {'is' if left == 1 else 'are'} left"
        told = "; ".join(fault.text for fault in self._faults.values())
        return EndReport(
            node_rank=self._spec.node_rank,
            node_name=socket.gethostname(),
            rank=rank,
            cause=f"{gpus} for {num_workers} workers: {told}",
            consequences=(_HINT,),
            lacks_gpu=True,
        )

    def _look(self) -> None:
        """What failed just now may be a GPU, and the next regular look would come too late."""
        if self._watch is not None:
            self._watch.look_now(_LOOK_S)
            self._hear()

    def _hear(self) -> None:
        assert self._watch is not None, "only a watch that was started reports"
        if self._places is None and self._watch.uuids:
            self._places = GpuPlaces(self._watch.uuids, self._spec.workers_on(self._spec.node_rank))
        for fault in self._watch.take():
            if fault.uuid not in self._faults:
                self._faults[fault.uuid] = fault
                self._exclude(fault)

    def _exclude(self, fault: GpuFault) -> None:
        assert self._places is not None, "a GPU that reports is one of those that are watched"
        local_rank = next(
            (
                one
                for one in range(self._spec.workers_on(self._spec.node_rank))
                if self._places.gpu_of(one) == fault.uuid
            ),
            None,
        )
        rank = -1 if local_rank is None else self._rank_of(local_rank)
        self._places.excluded.add(fault.uuid)
        self._output.warn(f"{fault.text}; no worker is started on it any more")
        self._open_since[fault.uuid] = (time.monotonic(), rank)
        self._emit(fault, "open", "start no worker on it", rank)
        self._tell(
            {
                "type": "alert",
                "time": time.time(),
                "rank": rank,
                "severity": "critical",
                "name": "bad_gpu",
                "message": fault.text,
            }
        )

    def _end_incidents(self, status: IncidentStatus, action: str) -> None:
        opened, self._open_since = self._open_since, {}
        for uuid, (since_s, rank) in opened.items():
            self._emit(self._faults[uuid], status, action, rank, duration_s=time.monotonic() - since_s)

    def _emit(
        self, fault: GpuFault, status: IncidentStatus, action: str, rank: int, *, duration_s: float | None = None
    ) -> None:
        # Imported here: it takes a while, and the first worker does not wait for it.
        from torsh_distributed.events import IncidentEvent, emit

        emit(
            IncidentEvent(
                incident=f"{self._spec.node_rank} {fault.uuid}",
                rank=rank,
                failure="bad_gpu",
                status=status,
                action=action,
                detail=fault.text,
                duration_s=duration_s,
            )
        )

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._loop.unwatch(self._watch.reports)
            self._watch.close()
            self._watch = None
