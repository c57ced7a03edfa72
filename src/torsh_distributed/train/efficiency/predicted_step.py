"""What a step of a recorded job is predicted to take, as an event: the launcher compares it at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from torsh_distributed import events, upward
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import BackendNotInitialized
from torsh_distributed.plan import Plan


def emit_prediction(
    model: nn.Module, plan: Plan, *, optimizer: str, example: tuple[Any, ...] | Mapping[str, Any] | None
) -> None:
    """On rank 0 of a recorded job, before the model is spread; `plan` is resolved for its world.

    Only where `torsh bench machine` has measured the machine: else there is nothing to correct.
    """
    if process_group.rank() != 0 or "TORSH_EVENTS_DIR" not in os.environ:
        return
    try:
        num_local = process_group.local_world_size()
    except BackendNotInitialized:  # torch has brought the group up: which ranks share a node is unknown
        num_local = process_group.world_size()
    parts = upward.load(upward.PREDICTED_PARTS)(
        model, plan, optimizer=optimizer.rpartition(".")[2], num_local=num_local, example=example
    )
    if parts is not None:
        seconds = {f"{part}_s": value for part, value in parts.items()}
        events.emit(events.PredictionEvent(model=type(model).__name__, mesh=plan.mesh.equation, **seconds))
