"""What the planner says against what is measured: memory and step time of models and plans, and how long it plans."""

from __future__ import annotations

import datetime
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness import OURS, Budget, Case, Measurement, Note, Row, Unit
from benchmarks.planned_models import BATCH, MODELS, Build, measured_peak, measured_step_s, tracked_peak
from tests.bed.world import ROOT, World, WorldError
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument
from torsh_distributed.plan import Plan
from torsh_distributed.planner.forecast.simulated_steps import Spreads, simulate_steps
from torsh_distributed.planner.machine import machine_file
from torsh_distributed.planner.machine.link_measuring import measure_collectives, measure_interference
from torsh_distributed.planner.machine.machine_profile import machine_named
from torsh_distributed.planner.machine.measuring import OperationTimer, measure_operations
from torsh_distributed.planner.machine.past_runs import PastRun, PastRuns, corrected_s
from torsh_distributed.planner.machine.step_time import StepPredictor
from torsh_distributed.planner.machine.this_machine import measured_machine
from torsh_distributed.planner.memory.optimizer_profile import optimizer_named
from torsh_distributed.planner.memory.rank_memory import estimate_memory
from torsh_distributed.planner.model.profiling import profile_model
from torsh_distributed.planner.search.auto_plan import ranked_plans

DEEPSPEED = ROOT / "build" / "deepspeed"
PARTS = ("memory", "time", "search")
_LIMIT_S = 240.0
_APART = 1.03
"""Plans that differ by less are not in an order."""
_PLAIN = "one rank"
_PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        _PLAIN: {},
        "two passes": {"training": {"gradient_accumulation": 2}},
        "recomputed": {"activation": {"strategy": "uniform", "every_n_layers": 1}},
    },
    2: {
        "replicas": {"dp": 2},
        "ZeRO-3": {"dp": 1, "shard": 2},
        "tensor": {"dp": 1, "tp": 2},
        "pipeline": {"dp": 1, "pp": 2},
    },
    4: {"replicas": {"dp": 4}, "ZeRO-3": {"dp": 1, "shard": 4}},
}


def _pairs(budget: Budget, most_ranks: int) -> Iterator[tuple[str, Build, int, str, Plan]]:
    """Models × plans; a quick run takes one model and one rank."""
    for num_ranks, plans in _PLANS.items():
        if num_ranks > (1 if budget.is_quick else most_ranks):
            return
        for name, build in itertools.islice(MODELS.items(), 1 if budget.is_quick else None):
            for text, sections in plans.items():
                training = {"batch_size": BATCH, **sections.get("training", {})}
                yield name, build, num_ranks, text, Plan(**{**sections, "training": training})


def _row_of(name: str, said: dict[str, float], measured: float) -> Row:
    """How far off each one is, as a share of what was measured."""
    errors = {who: Measurement.of([abs(value / measured - 1)]) for who, value in said.items()}
    return Row(name=name, unit=Unit.ERROR, ours=errors.pop(OURS), rivals=errors)


def _summary(part: str, ratios: list[float]) -> Note:
    errors = [abs(one - 1) for one in ratios]
    return Note(
        text=f"{part}: {len(ratios)} pairs, median error {statistics.median(errors):.1%}, worst {max(errors):.1%},"
        f" predicted over measured {min(ratios):.2f} to {max(ratios):.2f}"
    )


# --- memory --------------------------------------------------------------------------------------------------------


def _memory(budget: Budget, world: World) -> Iterator[Row | Note]:
    ratios = []
    for name, build, num_ranks, text, plan in _pairs(budget, 2):
        model = build()
        try:
            profile = profile_model(model, plan)
            table = estimate_memory(profile, plan.resolve(num_ranks), optimizer_named("AdamW"), device_type="cpu")
            measured = max(world.run(measured_peak, build, plan, num_ranks=num_ranks, timeout_s=_LIMIT_S))
        except (ConfigurationError, FeatureNotAvailable, InvalidArgument, WorldError) as error:
            yield Note(text=f"memory: {name}, {text}: not measured: {str(error).strip().splitlines()[-1][:200]}")
            continue
        said = {OURS: table.peak_bytes, **_others(model, plan, num_ranks)}
        tracked = tracked_peak(build) if text == _PLAIN else None
        if tracked is not None:
            said["torch's tracker"] = tracked
        ratios.append(table.peak_bytes / measured)
        yield _row_of(f"memory: {name}, {text}, {num_ranks} ranks", said, measured)
    if ratios:
        yield _summary("memory", ratios)


def _others(model: nn.Module, plan: Plan, num_ranks: int) -> dict[str, float]:
    """What other estimators say in bytes: none of them knows batch, activations or other axes than ZeRO's."""
    from accelerate.utils import calculate_maximum_sizes

    # Of `accelerate estimate-memory`: weights, gradients and two states of Adam.
    found = {"accelerate": 4.0 * calculate_maximum_sizes(model)[0]}
    try:
        if str(DEEPSPEED) not in sys.path:
            sys.path.append(str(DEEPSPEED))
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError:
        return found
    total = sum(param.numel() for param in model.parameters())
    largest = max(param.numel() for param in model.parameters())
    if plan.mesh.shard > 1:
        _, needed, _ = estimate_zero3_model_states_mem_needs(
            total, largest, num_gpus_per_node=num_ranks, cpu_offload=False, cpu_offload_params=False
        )
    else:
        _, needed = estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=1, cpu_offload=False)
    return {**found, "DeepSpeed": float(needed)}


# --- time ----------------------------------------------------------------------------------------------------------


def measured_rates(num_threads: int, duration_s: float) -> machine_file.Measurement:
    """Runs on every rank: what `torsh bench machine` measures."""
    torch.set_num_threads(num_threads)
    count = dist.get_world_size()
    timer = OperationTimer(torch.device("cpu"), meet=dist.barrier if count > 1 else lambda: None)
    return machine_file.Measurement(
        num_ranks=count,
        date=datetime.date.today().isoformat(),
        rates=measure_operations(timer),
        spread=statistics.median(timer.spreads),
        collectives=measure_collectives(duration_s) if count > 1 else {},
        interference=measure_interference() if count > 1 else None,
    )


def _time(budget: Budget, world: World) -> Iterator[Row | Note]:
    ratios: list[float] = []
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    known: dict[int, machine_file.Measurement] = {}
    for name, build, num_ranks, text, plan in _pairs(budget, 4):
        threads = max(1, (os.cpu_count() or 1) // num_ranks)
        if num_ranks not in known:
            known[num_ranks] = world.run(
                measured_rates, threads, budget.sample_s, num_ranks=num_ranks, timeout_s=_LIMIT_S
            )[0]
            yield Note(text=f"time: rates with {num_ranks} ranks have a spread of {known[num_ranks].spread:.0%}")
        try:
            profile = profile_model(build(), plan)
            predictor = StepPredictor(profile, measured_machine(known[num_ranks]), optimizer_named("AdamW"))
            said = predictor.step_time(plan.resolve(num_ranks)).total_s
            args = (build, plan, threads, budget.num_samples)
            measured = max(world.run(measured_step_s, *args, num_ranks=num_ranks, timeout_s=_LIMIT_S))
        except (ConfigurationError, FeatureNotAvailable, InvalidArgument, WorldError) as error:
            yield Note(text=f"time: {name}, {text}: not measured: {str(error).strip().splitlines()[-1][:200]}")
            continue
        ratios.append(said / measured)
        found.setdefault((name, num_ranks), []).append((said, measured))
        yield _row_of(f"time: {name}, {text}, {num_ranks} ranks", {OURS: said}, measured)
    if ratios:
        yield _summary("time", ratios)
        yield from _orders(list(found.values()))
        yield from _covered(found)


def _orders(groups: list[list[tuple[float, float]]]) -> Iterator[Note]:
    """Whether plans come in the measured order, and what the first of each group costs over the best one."""
    agreeing = total = 0
    for group in groups:
        for one, another in itertools.combinations(group, 2):
            slower, faster = sorted((one, another), key=lambda pair: -pair[1])
            if slower[1] > _APART * faster[1]:
                total += 1
                agreeing += 1 if slower[0] > faster[0] else -1
    lost = [min(group)[1] / min(measured for _, measured in group) - 1 for group in groups if len(group) > 1]
    if total:
        yield Note(
            text=f"time: Kendall's τ {agreeing / total:.2f} over {total} pairs of plans more than 3 % apart; the chosen"
            f" plan takes {statistics.median(lost):.1%} more than the best one in the median, {max(lost):.1%} at worst"
        )


def _covered(found: dict[tuple[str, int], list[tuple[float, float]]]) -> Iterator[Note]:
    """How many steps are in the 90 % interval that other models on as many ranks give, as recorded runs would."""
    by_ranks: dict[int, list[PastRun]] = {}
    for (name, num_ranks), pairs in found.items():
        for said, measured in pairs:
            seconds = ({"compute": one} for one in (said, measured))
            run = PastRun(date="", what=name, num_ranks=num_ranks, predicted_s=next(seconds), measured_s=next(seconds))
            by_ranks.setdefault(num_ranks, []).append(run)
    inside = total = 0
    for num_ranks, runs in by_ranks.items():
        for run in runs:
            others = PastRuns(tuple(one for one in runs if one.what != run.what))
            interval = others.interval(num_ranks)
            if interval is None:
                continue
            expected = corrected_s(run.predicted_s, others.factors(num_ranks))
            total += 1
            inside += interval[0] <= run.total_s / expected <= interval[1]
    if total:
        yield Note(text=f"time: 90 % intervals, each from other models on as many ranks: {inside} of {total} inside")


# --- search --------------------------------------------------------------------------------------------------------


def _planned(kind: str, config: str, num_ranks: int, batch: int) -> tuple[float, Plan, nn.Module]:
    """Seconds from a model to its ranking, processor time: what else runs here is not the planner's."""
    import transformers

    with torch.device("meta"):
        model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)())
    base = Plan(training={"batch_size": batch}, precision={"dtype": "bf16"})
    started = time.process_time()
    ranking = ranked_plans(model, world_size=num_ranks, machine=machine_named("h100"), base=base, sequence=2048)
    return time.process_time() - started, ranking.plans[0].plan, model


def _search(budget: Budget) -> Iterator[Row]:
    # The first one imports what the others have then.
    _planned("LlamaForCausalLM", "LlamaConfig", 2, 2)
    times = [_planned("LlamaForCausalLM", "LlamaConfig", 64, 1024)[0] for _ in range(1 if budget.is_quick else 3)]
    yield Row(name="search: Llama of 7 B on 64 ranks", unit=Unit.SECONDS, ours=Measurement.of(times))
    if not budget.is_quick:
        taken = _planned("MixtralForCausalLM", "MixtralConfig", 2048, 8192)[0]
        yield Row(name="search: Mixtral 8x7B on 2,048 ranks", unit=Unit.SECONDS, ours=Measurement.of([taken]))
    yield _simulated()


def _simulated() -> Row:
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    plan = Plan(dp=1250, tp=8, training={"batch_size": 1250}, precision={"dtype": "bf16"}).resolve(10_000)
    predictor = StepPredictor(
        profile_model(model, plan, sequence=2048), machine_named("h100"), optimizer_named("AdamW")
    )
    phases = predictor.phases(plan)
    started = time.process_time()
    simulate_steps(phases, plan, spreads=Spreads(ranks=0.02, phases=0.05), num_steps=4)
    taken = (time.process_time() - started) / 5  # and one of equal ranks
    return Row(name="search: a simulated step of 10,000 ranks", unit=Unit.SECONDS, ours=Measurement.of([taken]))


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if budget.wants("search"):
        yield from _search(budget)
    world = World()
    try:
        if budget.wants("memory"):
            yield from _memory(budget, world)
        if budget.wants("time"):
            yield from _time(budget, world)
    finally:
        world.close()


CASE = Case(
    title="Planning: what is said and what is measured",
    about="""Small models of transformers and one of this repository, AdamW, batches of 8, CPU ranks. Memory: the
    estimated peak of a rank against storages counted in the third step; accelerate is its estimate-memory,
    DeepSpeed its estimator of model states, torch's tracker counts a plain loop on tensors without data. Time: the
    predicted step against the median of real ones, from rates measured in the same run. A number is how far off it
    is. Search: processor time from a model without weights to the ranking of its plans.""",
    rows=_rows,
    parts=PARTS,
)
