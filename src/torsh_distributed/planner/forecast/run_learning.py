"""What a recorded run teaches: its step as predicted and as measured, kept in the machine's file."""

from __future__ import annotations

import datetime
import logging
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.observe.bottlenecks.step_times import RecordedStep, step_times
from torsh_distributed.observe.trace.event_files import align_clocks, read_run
from torsh_distributed.plan import Plan
from torsh_distributed.planner.machine.machine_file import MachineFile, machine_path
from torsh_distributed.planner.machine.past_runs import PARTS, PastRun, PastRuns
from torsh_distributed.planner.machine.step_time import StepPredictor
from torsh_distributed.planner.machine.this_machine import measured_machine
from torsh_distributed.planner.memory.optimizer_profile import optimizer_or_assumed
from torsh_distributed.planner.model.profiling import profile_model

_log = logging.getLogger(__name__)


def predicted_parts(
    model: nn.Module, plan: Plan, *, optimizer: str, num_local: int, example: Any = None
) -> dict[str, float] | None:
    """Seconds of a step by part, from the rates that `torsh bench machine` has measured with so many ranks.

    `plan` is resolved for its world; `optimizer` is the name of its class. None where nothing was measured, where that
    was another machine, or where the model cannot be traced: a run is not held up by what is only recorded.
    """
    file = _own_file()
    if file is None or num_local not in file.by_ranks:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            profile = profile_model(model, plan, example=example)
        known, _ = optimizer_or_assumed(optimizer)
        machine = measured_machine(file.by_ranks[num_local], file.past)
        return StepPredictor(profile, machine, known).step_time(plan).uncorrected()
    except Exception as error:  # a model may refuse shapes without values in any way; training does not depend on it
        _log.debug("the step of %s is not predicted: %s", type(model).__name__, error)
        return None


def keep_run(folder: Path) -> str | None:
    """Add a recorded run to this machine's file; what was predicted and measured, in a sentence.

    None for a run without a prediction, or where the machine's rates were not measured.
    """
    run = read_run(folder)
    said = next((record for _, record in run.of("prediction")), None)
    file = _own_file()
    if said is None or file is None:
        return None
    ranks = {rank: steps for rank, steps in step_times(run, align_clocks(run)).items() if steps}
    if not ranks:
        return "a step was predicted, and none was recorded after the first: nothing is learned from this run"
    # What is predicted is the slowest rank: the one that computes the longest.
    measured = max((_median_parts(steps) for steps in ranks.values()), key=lambda parts: parts["compute"])
    found = PastRun(
        date=datetime.date.today().isoformat(),
        what=f"{said['model']}, {said['mesh']}",
        num_ranks=len(run.ranks),
        predicted_s={part: said[f"{part}_s"] for part in PARTS},
        measured_s=measured,
    )
    MachineFile(file.fingerprint, file.by_ranks, PastRuns((*file.past.runs, found))).save(machine_path())
    ratios = ", ".join(
        f"{part} {measured[part] / found.predicted_s[part]:.2f}" for part in PARTS if found.predicted_s[part] > 0
    )
    return (
        f"a step was predicted from rates to take {sum(found.predicted_s.values()) * 1e3:.1f} ms and took"
        f" {found.total_s * 1e3:.1f} (measured over predicted: {ratios}); predictions for {found.num_ranks} ranks"
        " here are corrected by it"
    )


def _own_file() -> MachineFile | None:
    path = machine_path()
    if not path.exists():
        return None
    try:
        file = MachineFile.load(path)
    except ConfigurationError as error:
        _log.warning("nothing is predicted or learned: %s", error)
        return None
    return None if file.differences() else file


def _median_parts(steps: list[RecordedStep]) -> dict[str, float]:
    """The typical step by part. What no span covers is the host's work; waiting for data is not the plan's."""
    found = {part: statistics.median(one.parts[part] for one in steps) for part in PARTS}
    found["compute"] += statistics.median(one.parts["other"] for one in steps)
    return found
