"""What is trained with several ranks on one GPU: plans by part of the library, and the guide's table of them.

`python -m tests.train.shared_gpu.cases` prints the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.parallel.models.zoo import SPECIMENS

SCHEDULES = {
    "gpipe": 1,
    "one_f_one_b": 1,
    "interleaved_one_f_one_b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv_zero_bubble": 2,
    "dual_pipe_v": 2,
}
"""Schedule to stages of a rank."""

EXACT, ROUNDED, COARSE = 1e-4, 5e-3, 3e-2
"""How near losses come: in fp32; with gradients of 16 bits; with products of 16 or 8 bits, or gradients of fewer."""


@dataclass(frozen=True)
class Case:
    """A plan that must give the losses of one process."""

    name: str
    num_ranks: int
    plan: Mapping[str, Any]
    model: str = "Llama"
    within: float = EXACT


@dataclass(frozen=True)
class Part:
    """Cases that run one after the other in one world of each size."""

    title: str
    cases: list[Case] = field(default_factory=list)

    def add(
        self, name: str, mesh: Mapping[str, int], *, model: str = "Llama", within: float = EXACT, **plan: Any
    ) -> None:
        """One more case; its world is as large as its mesh."""
        sections = {"mesh": {"dp": 1, **mesh}, **plan}
        self.cases.append(Case(name, math.prod(mesh.values()), sections, model, within))


def _replicas() -> Part:
    part = Part("replicas and gradients")
    for dp in (2, 4):
        part.add("`mesh.dp`", {"dp": dp})
    part.add("accumulation, clipping", {"dp": 2}, training={"gradient_accumulation": 2, "gradient_clipping": 100.0})
    part.add("searched graph", {"dp": 2}, ddp={"find_unused_parameters": True})
    part.add("`bf16` gradients", {"dp": 2}, within=ROUNDED, compress={"method": "bf16"})
    small = {"warmup_steps": 0, "skip_below_numel": 0}
    part.add("`int8` gradients", {"dp": 2}, within=COARSE, compress={"method": "int8", **small})
    part.add("`powersgd:16` gradients", {"dp": 4}, within=COARSE, compress={"method": "powersgd:16", **small})
    return part


def _shards() -> Part:
    part = Part("shards")
    for shard in (2, 4):
        part.add("`mesh.shard`", {"shard": shard})
    for strategy in ("shard_grad_op", "shard_optimizer"):
        part.add(f"`{strategy}`", {"shard": 2}, fsdp={"strategy": strategy})
    part.add("layers recomputed", {"shard": 2}, activation={"strategy": "uniform"})
    part.add("`bf16` gradients", {"shard": 2}, within=ROUNDED, compress={"method": "bf16"})
    part.add("hybrid, dp × shard", {"dp": 2, "shard": 2})
    part.add("hybrid, accumulated", {"dp": 2, "shard": 2}, training={"gradient_accumulation": 2})
    return part


def _layers() -> Part:
    part = Part("split layers")
    part.add("`mesh.tp`", {"tp": 2})
    part.add("sequence parallel", {"tp": 2}, tensor={"sequence_parallel": True})
    part.add("loss parallel", {"tp": 2}, tensor={"loss_parallel": True})
    part.add("four ways", {"tp": 4}, model="GPT-2")
    part.add("dp × tp", {"dp": 2, "tp": 2})
    part.add("shard × tp", {"shard": 2, "tp": 2})
    part.add("shard × tp, sequence parallel", {"shard": 2, "tp": 2}, tensor={"sequence_parallel": True})
    return part


def _pipelines() -> Part:
    part = Part("pipelines")
    for schedule, stages in SCHEDULES.items():
        settings = {"num_microbatches": 4, "schedule": schedule, "stages_per_rank": stages}
        part.add(f"`{schedule}`", {"pp": 2}, pipeline=settings)
    few = {"num_microbatches": 2}
    part.add("four stages", {"pp": 4}, pipeline={"num_microbatches": 4})
    part.add("dp × pp", {"dp": 2, "pp": 2}, pipeline=few)
    part.add("shard × pp", {"shard": 2, "pp": 2}, pipeline=few)
    part.add("tp × pp", {"tp": 2, "pp": 2}, pipeline=few)
    return part


def _sequences() -> Part:
    part = Part("split sequences")
    for form in ("ring", "ulysses"):
        part.add(f"`{form}`", {"cp": 2}, context={"form": form})
    part.add("four ways", {"cp": 4})
    for axis in ("dp", "shard", "tp", "pp"):
        extra = {"pipeline": {"num_microbatches": 2}} if axis == "pp" else {}
        part.add(f"{axis} × cp", {axis: 2, "cp": 2}, **extra)
    return part


def _experts() -> Part:
    part = Part("experts")
    for ep in (2, 4):
        part.add("`mesh.ep`", {"ep": ep}, model="Qwen3-MoE")
    for axis in ("dp", "shard", "tp"):
        part.add(f"{axis} × ep", {axis: 2, "ep": 2}, model="Qwen3-MoE")
    part.add("`mesh.shard`", {"shard": 2}, model="Mixtral")
    return part


def _offload() -> Part:
    part = Part("offload")
    state = {"enabled": True, "params": False, "grads": False}
    part.add("optimizer state, dp", {"dp": 2}, offload=state)
    part.add("optimizer state, shard", {"shard": 2}, offload=state)
    part.add("everything, dp", {"dp": 2}, offload={"enabled": True})
    return part


def _compiled() -> Part:
    part = Part("compiled, bf16")
    fast: dict[str, Any] = {"precision": {"dtype": "bf16"}, "compile": {"enabled": True}, "within": COARSE}
    for axis in ("dp", "shard", "tp"):
        part.add(f"{axis}", {axis: 2}, **fast)
    part.add("pp", {"pp": 2}, pipeline={"num_microbatches": 2}, **fast)
    part.add("ep", {"ep": 2}, model="Qwen3-MoE", **fast)
    part.add("dp × shard", {"dp": 2, "shard": 2}, **fast)
    part.add("fp16, dp", {"dp": 2}, within=COARSE, precision={"dtype": "fp16"})
    return part


def _fp8() -> Part:
    part = Part("fp8")
    for axis in ("dp", "shard"):
        part.add(axis, {axis: 2}, within=0.1, precision={"dtype": "fp8"}, compile={"enabled": True})
    part.add("dp × shard", {"dp": 2, "shard": 2}, within=0.1, precision={"dtype": "fp8"})
    return part


def _models() -> Part:
    part = Part("models of transformers")
    tried = [one for one in SPECIMENS.values() if not one.is_from_torchvision and one.name != "Llama"]
    for number, one in enumerate(tried):
        if one.has_experts:
            part.add(f"{one.name}, ep", {"ep": 2}, model=one.name)
            continue
        axis = ("shard", "tp", "pp", "dp")[number % 4] if one.is_decoder else "shard"
        extra = {"pipeline": {"num_microbatches": one.num_microbatches}} if axis == "pp" else {}
        part.add(f"{one.name}, {axis}", {axis: 2}, model=one.name, **extra)
    return part


PARTS: dict[str, Part] = {
    part.title: part
    for part in (
        _replicas(),
        _shards(),
        _layers(),
        _pipelines(),
        _sequences(),
        _experts(),
        _offload(),
        _compiled(),
        _fp8(),
        _models(),
    )
}


def table() -> str:
    """What was tried, for the guide."""
    lines = ["| | 2 ranks | 4 ranks |", "|---|---|---|"]
    for part in PARTS.values():
        cells = ["; ".join(one.name for one in part.cases if one.num_ranks == size) for size in (2, 4)]
        lines.append(f"| {part.title} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
