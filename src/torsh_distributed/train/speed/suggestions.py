"""What would make a run faster or smaller and was not asked for, with the gain to expect.

Gains come from what is measured: `torsh why` takes shares of the run's own steps. What compilation saves was measured
with whole models on one H200 (the guide on speed has the figures), an update by the bytes that it moves, so on another
GPU it is scaled by the memory's bandwidth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from torsh_distributed import events, upward
from torsh_distributed.comm.groups import process_group
from torsh_distributed.parallel.local_tensors import local_of
from torsh_distributed.plan import Plan
from torsh_distributed.plan.compatibility.rules import broken_rules
from torsh_distributed.plan.compatibility.speed_rules import can_fuse_loss
from torsh_distributed.train.speed.deferred_logits import LARGE_HEAD, find_head

COMPILED = (1.2, 2.1)
"""How many times as fast compiled layers are, from the least to the most of the models that were measured."""
_SAVED_S = 14e-12
"""What fused AdamW saves for each parameter on an H200: 8 instead of 22 picoseconds."""
_H200_BYTES_PER_S = 4.8e12
_PROBE_SIZE = 4096
_PROBE_TURNS = 5


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
            part="busy",
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


def plan_suggestions(plan: Plan) -> Iterator[events.SuggestionEvent]:
    """What the plan alone tells, on any device; `plan` is resolved for its world."""
    if plan.mesh.pp > 1:
        yield from _smaller_bubble(plan)
    if plan.activation.strategy != "none":
        yield events.SuggestionEvent(
            title="keep what forward computes, in place of computing it again",
            plan_change='[activation]\nstrategy = "none"',
            gain=1.0,
            part="forward",
            is_bound=True,
            takes_memory=True,
            evidence=f'activation.strategy = "{plan.activation.strategy}" repeats forward, or some of it, in backward',
        )


def _smaller_bubble(plan: Plan) -> Iterator[events.SuggestionEvent]:
    """At both ends of a step stages wait for as many microbatches as there are stages, however small these are."""
    pipeline, wanted = plan.pipeline, 2 * plan.pipeline.num_microbatches
    samples, rest = divmod(plan.training.batch_size, plan.mesh.data_degree * plan.training.gradient_accumulation)
    if not rest and samples % wanted == 0:
        yield events.SuggestionEvent(
            title=f"cut a batch into {wanted} microbatches, not {pipeline.num_microbatches}",
            plan_change=f"[pipeline]\nnum_microbatches = {wanted}",
            gain=0.5,
            part="bubble",
            is_bound=True,
            evidence=f"stages wait for {plan.mesh.pp - 1} microbatches before they are all at work, and after: halves",
        )
    elif pipeline.schedule in ("gpipe", "one_f_one_b"):
        yield events.SuggestionEvent(
            title="hold two stages on each rank",
            plan_change='[pipeline]\nschedule = "interleaved_one_f_one_b"\nstages_per_rank = 2',
            gain=0.5,
            part="bubble",
            is_bound=True,
            evidence=f"stages wait for {plan.mesh.pp - 1} microbatches before they are all at work, and after: those of"
            " stages of half the size; they send twice as often",
        )


def bf16_suggestion(plan: Plan, device: torch.device) -> events.SuggestionEvent | None:
    """How much less time matrix products take in bf16, measured on this GPU; None if they are in 16 bits already."""
    if plan.precision.dtype != "fp32" or device.type != "cuda" or not torch.cuda.is_bf16_supported():
        return None
    wide_s, narrow_s = (_product_s(dtype, device) for dtype in (torch.float32, torch.bfloat16))
    if narrow_s >= wide_s:
        return None
    return events.SuggestionEvent(
        title="compute in bf16",
        plan_change='[precision]\ndtype = "bf16"',
        gain=1 - narrow_s / wide_s,
        part="busy",
        is_bound=True,
        evidence=f"a product of {_PROBE_SIZE} x {_PROBE_SIZE} matrices takes {wide_s * 1e3:.2f} ms in fp32 and"
        f" {narrow_s * 1e3:.2f} ms in bf16 on this {torch.cuda.get_device_name(device)}; less is gained where other"
        " operations take their time",
    )


def _product_s(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a product as the process is set up now, the least of some turns."""
    # Ones: random numbers would be taken from the generator that the user has seeded.
    left = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype, device=device)
    found = []
    for _ in range(_PROBE_TURNS):
        torch.cuda.synchronize(device)
        started_s = time.perf_counter()
        left @ left
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started_s)
    return min(found)


def suggest_fused_loss(plan: Plan, model: nn.Module, device: torch.device) -> None:
    """Emit what `fused_loss` would save, from the size of the first pass's logits, where the plan turns it off."""
    found = find_head(model) if device.type == "cuda" and plan.training.fused_loss is False else None
    if found is None or found[1].out_features < LARGE_HEAD or not can_fuse_loss(plan):
        return

    def look(_: nn.Module, __: object, logits: Any) -> None:
        handle.remove()
        if isinstance(logits, Tensor):
            num_bytes = local_of(logits).nbytes
            moved_s = 4 * num_bytes * plan.training.gradient_accumulation / _bytes_per_s(device)
            events.emit(
                events.SuggestionEvent(
                    title="compute head and loss together",
                    plan_change="[training]\nfused_loss = true",
                    gain_s=moved_s,
                    gain_bytes=2 * num_bytes,
                    evidence=f"the logits of a pass have {num_bytes / 2**20:.0f} MiB, and their gradient as many: each"
                    " is written and read at least once, at the bandwidth of this GPU's memory",
                )
            )

    handle = found[1].register_forward_hook(look)


def suggest_less_memory(model: nn.Module, plan: Plan, *, optimizer: str, example: Any) -> None:
    """Emit by how much changes of the plan lower a rank's estimated peak: on rank 0 of a recorded job on GPUs.

    Before the model is spread, which is when the planner can trace it. `torsh why` repeats them if memory was short.
    """
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    if process_group.rank() != 0 or "TORSH_EVENTS_DIR" not in os.environ or device.type == "cpu":
        return
    saved = upward.load(upward.MEMORY_CHANGES)(
        model,
        plan,
        optimizer=optimizer.rpartition(".")[2],
        world_size=process_group.world_size(),
        example=example,
    )
    for title, change, num_bytes in saved:
        events.emit(
            events.SuggestionEvent(
                title=title, plan_change=change, gain_bytes=num_bytes, evidence="estimated as `torsh plan fit` does"
            )
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
