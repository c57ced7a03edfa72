"""What would make a run on this GPU faster and was not asked for, with the gain to expect.

The gains were measured on one H200 (the guide on speed has the figures): compilation with whole models, an update by
the bytes that it moves, so on another GPU it is scaled by the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from torsh_distributed import events
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.plan import Plan
from torsh_distributed.plan.compatibility.rules import broken_rules

COMPILED = (1.2, 2.1)
"""How many times as fast compiled layers are, from the least to the most of the models that were measured."""
_SAVED_S = 14e-12
"""What fused AdamW saves for each parameter on an H200: 8 instead of 22 picoseconds."""
_H200_BYTES_PER_S = 4.8e12


def missing_speedups(plan: Plan, model: nn.Module, optimizer: Optimizer) -> Iterator[events.SuggestionEvent]:
    """What is worth trying, on a GPU; nothing elsewhere."""
    param = next(model.parameters(), None)
    if param is None or not param.is_cuda:
        return
    gpu = torch.cuda.get_device_name(param.device)
    if not plan.compile.enabled and not list(broken_rules(plan.replace(compile={"enabled": True}))):
        least, most = COMPILED
        yield events.SuggestionEvent(
            title="compile the layers",
            plan_change="[compile]\nenabled = true",
            gain=1 - 1 / least,
            evidence=f"a GPT of 124 M parameters, ViT-B/16 and Qwen3-0.6B were {least} to {most} times as fast with it"
            " on an H200, in bf16",
        )
    if _can_fuse(optimizer):
        num_params = sum(local_of(one).numel() for group in optimizer.param_groups for one in group["params"])
        saved_s = num_params * _SAVED_S * _H200_BYTES_PER_S / _bytes_per_s(param.device)
        yield events.SuggestionEvent(
            title=f"build the optimizer fused: {type(optimizer).__name__}(…, fused=True)",
            gain_s=saved_s,
            evidence=f"{num_params / 1e6:.0f} M parameters, {_SAVED_S * 1e12:.0f} ps for each on an H200, scaled by the"
            f" bandwidth of this {gpu}'s memory",
        )


def suggestion_line(found: list[events.SuggestionEvent]) -> str:
    """All of them, in one line for the log."""
    return "this run could be faster: " + "; ".join(_told(one) for one in found)


def _told(one: events.SuggestionEvent) -> str:
    change = one.title if not one.plan_change else one.plan_change.replace("]\n", "] ")
    expected = f"{one.gain_s * 1e3:.1f} ms less a step" if one.gain_s is not None else f"{one.gain or 0:.0%} less time"
    return f"{change} ({expected}, measured on an H200)"


def _can_fuse(optimizer: Optimizer) -> bool:
    """Adam on whole tensors of a GPU, neither fused nor capturable."""
    return type(optimizer) in (Adam, AdamW) and all(
        not group.get("fused") and all(param.is_cuda for param in group["params"]) for group in optimizer.param_groups
    )


def _bytes_per_s(device: torch.device) -> float:
    """Of the GPU's memory: two transfers of each clock, over the width of the bus."""
    properties = torch.cuda.get_device_properties(device)
    return 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
