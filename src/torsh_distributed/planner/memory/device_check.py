"""Whether a training fits into its device, before the first step: what `parallelize` asks on one rank."""

from __future__ import annotations

import logging
import os
from typing import Any

import tomli_w
import torch
from torch import nn

from torsh_distributed.plan import Plan
from torsh_distributed.planner.memory.closing_the_gap import MemoryQuestion
from torsh_distributed.planner.memory.memory_table import GB
from torsh_distributed.planner.memory.optimizer_profile import optimizer_or_assumed
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.profiling import profile_model

_log = logging.getLogger(__name__)


def memory_warning(model: nn.Module, plan: Plan, *, optimizer: str, device: torch.device, num_local: int) -> str | None:
    """A sentence if the estimated peak of a rank is above its device's memory; None if not, or if it is not known.

    `plan` is resolved for its world; `optimizer` is the name of its class; `num_local` ranks share a CPU's memory. The
    model's values and the random state stay as they are.
    """
    limit = _device_bytes(device, num_local)
    known, note = optimizer_or_assumed(optimizer)
    assumed = f"; {note}" if note else ""
    try:
        with torch.random.fork_rng(devices=[]):
            table = estimate_memory(profile_model(model, plan), plan, known, device_type=device.type)
    except Exception as error:  # a model may refuse shapes without values in any way; training does not depend on it
        _log.debug("the memory of %s is not estimated: %s", type(model).__name__, error)
        return None
    if table.peak_bytes <= limit:
        return None
    largest = sorted(table.peak.terms.items(), key=lambda term: -term[1])[:3]
    terms = ", ".join(f"{name} {size / GB:.1f}" for name, size in largest)
    return (
        f"the estimated peak of a rank is {table.peak_bytes / GB:.1f} GB in {table.peak.moment}, and its device has"
        f" {limit / GB:.1f} GB ({terms} GB{assumed}); `torsh plan fit` says which change of the plan would fit"
    )


def memory_changes(
    model: nn.Module, plan: Plan, *, optimizer: str, world_size: int, example: Any
) -> list[tuple[str, str, int]]:
    """Changes that lower the estimated peak of a rank: title, text of a plan and bytes; none if it cannot be estimated.

    Of changes of one key, the smallest. The model's values and the random state stay as they are.
    """
    known, _ = optimizer_or_assumed(optimizer)
    try:
        with torch.random.fork_rng(devices=[]):
            question = MemoryQuestion(profile_model(model, plan, example=example), known, world_size, float("inf"))
            now = question.table(plan).peak_bytes
            found, _ = question.closing(plan)
    except Exception as error:  # as above
        _log.debug("changes of the memory of %s are not estimated: %s", type(model).__name__, error)
        return []
    first: dict[str, tuple[str, str, int]] = {}
    for one in found:
        told = (one.text, _difference(plan, one.plan), int(now - one.peak_bytes))
        first.setdefault(one.text.partition(" ")[0], told)
    return list(first.values())


def _difference(before: Plan, after: Plan) -> str:
    """The sections and keys in which a plan differs from another, as text of a plan."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    changed = {
        section: {key: value for key, value in keys.items() if value != old[section][key]}
        for section, keys in new.items()
        if isinstance(keys, dict) and keys != old[section]
    }
    return tomli_w.dumps(changed).strip()


def _device_bytes(device: torch.device, num_local: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / num_local
