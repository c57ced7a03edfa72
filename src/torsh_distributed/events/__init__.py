"""Typed events and the bus that carries them: `emit`, `subscribe`, `wanted`."""

from torsh_distributed.events.bus import Handler, emit, subscribe, wanted
from torsh_distributed.events.jsonl import JsonlSink, to_record
from torsh_distributed.events.types import (
    AlertEvent,
    BucketEvent,
    CheckpointEvent,
    CollectiveEvent,
    DecisionEvent,
    Event,
    LogEvent,
    MembershipEvent,
    MemoryEvent,
    PressureEvent,
    RebalanceEvent,
    RoutingEvent,
    StepEvent,
    current_rank,
    event_types,
    set_rank,
)

__all__ = [
    "AlertEvent",
    "BucketEvent",
    "CheckpointEvent",
    "CollectiveEvent",
    "DecisionEvent",
    "Event",
    "Handler",
    "JsonlSink",
    "LogEvent",
    "MembershipEvent",
    "MemoryEvent",
    "PressureEvent",
    "RebalanceEvent",
    "RoutingEvent",
    "StepEvent",
    "current_rank",
    "emit",
    "event_types",
    "set_rank",
    "subscribe",
    "to_record",
    "wanted",
]
