"""What a script did through another library's calls, summed up from events: one class for all of those libraries.

The stand-ins emit the events of this library's own layers, so metrics, traces and the page show them too. This is for a
script that wants the figures itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torsh_distributed import events
from torsh_distributed.comm.recording.communication_stats import CommunicationStats

_CHANGES = ("regrouped", "recovered", "lost")


class ScriptStats:
    """Counts from `attach` to `detach`, or inside `with ScriptStats() as stats:`."""

    def __init__(self) -> None:
        self.communication = CommunicationStats()
        """The operations by kind: how many, how large, how long, how they failed."""
        self.num_steps = 0
        self.num_buckets = 0
        self.gradient_bytes = 0
        """Bytes of the gradients that were reduced, before compression."""
        self.compressed_bytes = 0
        """The part of `gradient_bytes` that was compressed or cast."""
        self.wire_bytes = 0
        """What this rank sent for that part."""
        self.changes: dict[str, int] = {}
        """Changes of an elastic job, by kind: regrouped, recovered, lost."""
        self._detach: Callable[[], None] | None = None

    @property
    def bytes_per_wire_byte(self) -> float | None:
        """Bytes of gradients for each byte sent; None if nothing was compressed."""
        return self.compressed_bytes / self.wire_bytes if self.wire_bytes else None

    def attach(self) -> Self:
        """Count from now on."""
        if self._detach is None:
            self.communication.attach()
            self._detach = events.subscribe(self._take, events.BucketEvent, events.MembershipEvent, events.StepEvent)
        return self

    def detach(self) -> None:
        """Stop counting; the counts stay. A second call does nothing."""
        detach, self._detach = self._detach, None
        if detach is not None:
            detach()
            self.communication.detach()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _take(self, event: events.Event) -> None:
        match event:
            case events.BucketEvent():
                self.num_buckets += 1
                self.gradient_bytes += event.num_bytes
                if event.wire_bytes is not None:
                    self.compressed_bytes += event.num_bytes
                    self.wire_bytes += event.wire_bytes
            case events.StepEvent():
                self.num_steps += 1
            case events.MembershipEvent() if event.action in _CHANGES:
                self.changes[event.action] = self.changes.get(event.action, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """All figures, JSON-ready."""
        return {
            "num_steps": self.num_steps,
            "num_buckets": self.num_buckets,
            "gradient_bytes": self.gradient_bytes,
            "compressed_bytes": self.compressed_bytes,
            "wire_bytes": self.wire_bytes,
            "bytes_per_wire_byte": self.bytes_per_wire_byte,
            "changes": dict(self.changes),
            "communication": self.communication.to_dict(),
        }
