"""`torsh tune RUN --model …`: the plans that are predicted to be the fastest, run in turns until one is left.

Predictions narrow hundreds of plans down to a few, and order those badly that are near each other. Successive halving:
every plan that is left is run once more, in turns with the run as it was, and the slower half is given up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torsh_distributed.errors import ConfigurationError, InvalidArgument, ProcessFailure
from torsh_distributed.observe.bottlenecks.median_difference import MedianDifference, median_difference, median_of
from torsh_distributed.plan import Plan
from torsh_distributed.plan.plan import AUTO

_PLAN = "TORSH_PLAN"
AS_IT_WAS = "as it was"

Trial = Callable[[str, int], list[float]]
"""Runs the plan of this name for the so-manieth time: seconds of its steps. Raises ProcessFailure if the job fails."""


@dataclass
class Tuned:
    """What the trials of some plans found."""

    best: str | None
    """The plan that was left; None if all failed."""
    steps_s: dict[str, list[list[float]]] = field(default_factory=dict)
    """Steps of each run, by plan; `AS_IT_WAS` among them."""
    given_up: dict[str, str] = field(default_factory=dict)
    """Plan to the reason."""

    @property
    def gain(self) -> MedianDifference:
        """What the best one gains for each step, and the interval of 95 %."""
        assert self.best is not None, "asked for a gain of a plan that ran"
        return median_difference(self.steps_s[AS_IT_WAS], self.steps_s[self.best])


def halve(names: list[str], trial: Trial, *, rounds: int, tell: Callable[[str], None]) -> Tuned:
    """Run the plans in turns, `rounds` times each before the slower half is given up, until one is left.

    The run as it was takes its turn every time: machines drift. A plan whose job fails is given up; the run as it was
    must not fail.
    """
    found, left, count = Tuned(None, {name: [] for name in (AS_IT_WAS, *names)}), list(names), 0
    while left:
        for _ in range(rounds):
            for name in (AS_IT_WAS, *left):
                try:
                    found.steps_s[name].append(trial(name, count))
                except ProcessFailure as error:
                    if name == AS_IT_WAS:
                        raise
                    found.given_up[name] = str(error)
                    tell(f"{name}: given up: {error.message}")
                    continue
                tell(f"{name}: {median_of(found.steps_s[name][-1:]) * 1e3:.2f} ms a step")
            left = [name for name in left if name not in found.given_up]
            count += 1
        left.sort(key=lambda name: median_of(found.steps_s[name]))
        if len(left) < 2:
            break
        for name in left[(len(left) + 1) // 2 :]:
            found.given_up[name] = f"slower than others: {median_of(found.steps_s[name]) * 1e3:.2f} ms a step"
        left = left[: (len(left) + 1) // 2]
    found.best = left[0] if left else None
    return found


def recorded_plan(recorded: Mapping[str, Any]) -> Plan:
    """The plan that a run was recorded with: that of `--plan` or TORSH_PLAN, with the keys of other variables."""
    given, _ = _without_plan(recorded["arguments"])
    variables = dict(recorded.get("variables", {}))
    path = given or variables.pop(_PLAN, None)
    if path is None or path == AUTO:
        raise ConfigurationError(
            "the run was recorded without a plan file, so its batch and formats are not known",
            hint="record it with `torsh run --plan plan.toml --trace DIR`; the script takes td.Plan.from_env()",
        )
    variables.pop(_PLAN, None)
    return Plan.compose(Path(recorded["directory"]) / path, environ=variables)


def with_plan(recorded: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """How the run is started with another plan file, which says all that variables said."""
    _, arguments = _without_plan(recorded["arguments"])
    return {**recorded, "arguments": ["--plan", str(path.resolve()), *arguments], "variables": {}}


def _without_plan(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The value of `torsh run`'s own --plan, and the other arguments; those of the script come after its name."""
    end = next((at for at, one in enumerate(arguments) if one.endswith(".py") or one in ("-m", "--module")), None)
    for at, one in enumerate(arguments[:end]):
        if one == "--plan":
            return arguments[at + 1], arguments[:at] + arguments[at + 2 :]
        if one.startswith("--plan="):
            return one.partition("=")[2], arguments[:at] + arguments[at + 1 :]
    return None, arguments


def predicted_plans(model: str, base: Plan, *, num_ranks: int, count: int) -> dict[str, Plan]:
    """The plans that are predicted to be the fastest on this machine, by number and mesh."""
    from torsh_distributed.planner.machine.this_machine import this_machine
    from torsh_distributed.planner.model.model_source import find_model
    from torsh_distributed.planner.search.auto_plan import nearest, no_plan, ranked_plans

    found, machine = find_model(model), this_machine(num_ranks)
    ranking = ranked_plans(found.model, world_size=num_ranks, machine=machine, base=base, example=found.example)
    if not ranking.plans:
        raise InvalidArgument(no_plan(ranking, machine), hint=nearest(ranking))
    best = ranking.plans[:count]
    return {f"plan {number}, {one.plan.mesh.equation}": one.plan for number, one in enumerate(best, 1)}


def keep(found: Tuned, plan: Plan, folder: Path) -> str:
    """Write the plan that was left and what was measured; a sentence with the gain.

    A plan that is not clearly faster is not kept: the run stays as it was.
    """
    gain_s, low_s, high_s = found.gain
    was_s = median_of(found.steps_s[AS_IT_WAS])
    told = (
        f"{found.best}: {was_s * 1e3:.2f} ms → {(was_s - gain_s) * 1e3:.2f} ms a step, {gain_s * 1e3:+.2f} ms gained"
        f" (95 %: {low_s * 1e3:+.2f} to {high_s * 1e3:+.2f})"
    )
    document = {
        "plan": found.best,
        "was_s": was_s,
        "gain_s": gain_s,
        "low_s": low_s,
        "high_s": high_s,
        "steps_s": found.steps_s,
        "given_up": found.given_up,
    }
    (folder / "plans.json").write_text(json.dumps(document, indent=1) + "\n")
    if low_s <= 0:
        return f"{told}; no gain beyond the noise: the run stays as it was"
    path = folder / "plan.toml"
    plan.save(path, with_defaults=False)
    return f"{told}; it is in {path}"
