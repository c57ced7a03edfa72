"""The plan of a job that was started with `--plan auto`: rank 0 chooses it for all, before the model is spread."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from torsh_distributed import upward
from torsh_distributed.comm.agreement import fail_together
from torsh_distributed.comm.collectives.call import resolve_group
from torsh_distributed.comm.collectives.objects import broadcast_object
from torsh_distributed.comm.groups import process_group
from torsh_distributed.errors import BackendNotInitialized, ConfigurationError
from torsh_distributed.plan import Plan
from torsh_distributed.plan.plan import AUTO

_log = logging.getLogger(__name__)

_PLAN = "TORSH_PLAN"
_KEPT_IN = "TORSH_AUTO_PLAN"


def plan_of_job(
    model: nn.Module, plan: Plan, *, optimizer: str, example: tuple[Any, ...] | Mapping[str, Any] | None
) -> Plan:
    """`plan`, or the best one on this world with all else as in `plan`, if TORSH_PLAN is `auto`; every rank calls this.

    Rank 0 decides alone: ranks that measured different times would choose different plans. A job that is restarted
    finds its plan where the launcher keeps it and does not choose again.
    """
    if os.environ.get(_PLAN) != AUTO:
        return plan
    if plan.elastic.enabled:
        raise ConfigurationError(
            "--plan auto chooses for a fixed number of ranks, and elastic.enabled changes it while the job runs",
            hint="write the plan down with `torsh plan auto -o plan.toml`, or leave elastic out",
        )
    group = resolve_group(None)
    chosen: dict[str, Any] | None = None
    # The others wait here, so a failure of rank 0 is raised on all of them.
    with fail_together("choose a plan", group):
        if process_group.rank() == 0:
            chosen = _kept() or _chosen(model, plan, optimizer=optimizer, example=example)
    return Plan.from_dict(broadcast_object(chosen, 0, group=group))


def warn_of_unread_plan() -> None:
    """For `parallelize` without a plan: one that `torsh run --plan` names has no effect unless the script reads it."""
    named = os.environ.get(_PLAN) or ""
    keys = sorted(name for name in os.environ if name.startswith(f"{_PLAN}__"))
    unread = ", ".join(([named] if named not in ("", AUTO) else []) + keys)
    if unread and process_group.rank() == 0:
        _log.warning(
            "%s has no effect: the script gives parallelize() no plan, so it trains by the defaults;"
            " parallelize(model, optimizer, td.Plan.from_env()) takes it",
            unread,
        )


def _kept() -> dict[str, Any] | None:
    path = os.environ.get(_KEPT_IN)
    return Plan.load(path).to_dict() if path is not None and Path(path).exists() else None


def _chosen(model: nn.Module, plan: Plan, *, optimizer: str, example: Any) -> dict[str, Any]:
    try:
        num_local = process_group.local_world_size()
    except BackendNotInitialized:  # torch has brought the group up: which ranks share a node is unknown
        num_local = process_group.world_size()
    found, told = upward.load(upward.PLAN_AND_REASON)(
        model,
        world_size=process_group.world_size(),
        ranks_per_node=num_local,
        base=plan,
        optimizer=optimizer,
        example=example,
    )
    path = os.environ.get(_KEPT_IN)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        found.save(path, with_defaults=False)
        told = f"{told}; it is in {path}"
    _log.warning("planned: %s", told)
    values: dict[str, Any] = found.to_dict()
    return values
