"""What a layer reaches above or beside itself, by name: the whole list.

Imports go down only. In these places a user or a process enters through a lower layer and an upper one does the work,
or a layer asks whether another one is in use. A test resolves every entry and finds no other such name in the sources.
Imports nothing of this library: workers read it before anything else.
"""

from __future__ import annotations

import importlib
from typing import Any

DEEPSPEED_READER = "torsh_distributed.migrate.deepspeed.config.deepspeed_config:from_deepspeed"
"""`plan`: `Plan.from_deepspeed` is where users look for it; the reader knows plans."""

BEST_PLAN = "torsh_distributed.planner.search.auto_plan:best_plan"
"""`plan`: `Plan.auto` is where users look for it; the planner knows plans and models."""

PLAN_AND_REASON = "torsh_distributed.planner.search.auto_plan:plan_and_reason"
"""`train`: `parallelize` asks the planner beside it for a plan, in jobs that were started with `--plan auto`."""

PREDICTED_PARTS = "torsh_distributed.planner.forecast.run_learning:predicted_parts"
"""`train`: in a recorded job, `parallelize` notes what the planner beside it says of a step."""

MEMORY_WARNING = "torsh_distributed.planner.memory.device_check:memory_warning"
"""`train`: `parallelize` asks the planner beside it whether a model fits, for devices and models where it matters."""

MEMORY_CHANGES = "torsh_distributed.planner.memory.device_check:memory_changes"
"""`train`: in a recorded job, `parallelize` notes which changes of the plan would need less memory, and by how much."""

RECOMPUTATION = "torsh_distributed.planner.search.recompute_budget:decide_for_training"
"""`train`: `parallelize` asks the planner beside it which layers a memory budget lets it keep."""

BATCH_ESTIMATE = "torsh_distributed.planner.search.batch_estimate:largest_microbatch"
"""`train`: `plan_batch_size` asks the planner beside it for a model without memory, of which it can try no step."""

DEFERRED_LOGITS = "torsh_distributed.train.speed.deferred_logits"
"""`planner`: a model is traced as training will run it, with the head that `parallelize` would give it."""

LOSS_WORKSPACE = "torsh_distributed.train.speed.linear_cross_entropy:workspace_bytes"
"""`planner`: what a fused loss takes for the moment is known beside its code."""

ELASTIC_STEPS = "torsh_distributed.elastic.in_place:attach"
"""`train`: makes an Engine's steps outlive a lost rank, in elastic jobs alone; others do not import it."""

LAUNCHER_LINE = "torsh_distributed.launch.worker.launcher_line"
"""`train`: loaded in processes that have a launcher, before anything else; changes of a running job come over it."""

FAULTS = "torsh_distributed.elastic.faults.startup:torch_spec"
"""`launch`: brings the faults of TORSH_FAULTS into a worker whose script knows nothing of them."""

STAND_IN = "torsh_distributed.migrate.stand_in:install"
"""`launch`: what `torsh run --as LIBRARY` puts in the place of that library."""

PRELOADED = ("torsh_distributed.train.assemble", "torsh_distributed.elastic.in_place")
"""`launch`: what the warm spare imports beside `init`, so that workers forked from it need not."""

JOB_METER = "torsh_distributed.green.job_meter:JobMeter"
"""`launch`: reads the meters of a node, in jobs that ask for it; others do not import it."""

RUN_CONTROL = "torsh_distributed.green.run_control:RunControl"
"""`launch`: says when a job has spent what its plan allows, and whether it trains or holds."""

CPU_SETTINGS = "torsh_distributed.green.power.cpu_settings"
"""`launch`: sets the clocks and limits of processors and puts them back."""

GPU_LIMIT = "torsh_distributed.green.power.gpu_limit"
"""`launch`: sets the power limit of GPUs and puts it back."""

ENERGY_REPORT = "torsh_distributed.green.report.report_file:EnergyReportFile"
"""`observe`: the export that writes what a run has cost so far."""

COMMAND_LINE = "torsh_distributed.cli.entry_point"
"""`clusters`: the program that an engine starts as `python -m`, for a job over SSH."""


def load(place: str) -> Any:
    """The module, or the function of `module:function`. Any: the caller's layer does not know its type."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found
