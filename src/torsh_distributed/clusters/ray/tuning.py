"""`run_tuning`: Ray Tune over hyper-parameters and keys of a plan, each trial on one or several ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torsh_distributed.clusters.hosted.reporting import RESUME_VARIABLE, reporting_to
from torsh_distributed.clusters.ray.actor_pool import run_training
from torsh_distributed.clusters.ray.ray_config import RayConfig
from torsh_distributed.clusters.ray.ray_connection import connected
from torsh_distributed.clusters.ray.search_methods import TuningSearch, choose_method, make_scheduler, make_searcher
from torsh_distributed.deprecation import notice
from torsh_distributed.errors import ConfigurationError, InvalidArgument, ProcessFailure
from torsh_distributed.plan import Plan

_log = logging.getLogger(__name__)

_PLAN_PREFIX = "plan."
_WAITING_CPUS = 0.001
"""What a trial reserves that only waits for its ranks: Ray Tune takes no trial that reserves nothing."""


@dataclass(frozen=True, kw_only=True)
class TriedValues:
    """One trial: what was tried, and the last that it reported."""

    params: dict[str, Any]
    metrics: dict[str, Any]
    num_reports: int
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The best trial, by its last report, and all of them."""

    best: TriedValues
    trials: tuple[TriedValues, ...]


def run_tuning(
    function: Callable[..., Any],
    space: Mapping[str, Any],
    *,
    metric: str,
    mode: Literal["min", "max"] = "min",
    search: TuningSearch | None = None,
    plan: Plan | None = None,
    workers_per_trial: int = 1,
    config: RayConfig | None = None,
    storage_dir: str | None = None,
    **fields: Any,
) -> TuningResult:
    """Try values from `space` with `function(params)`, which calls `report({metric: …})` as it goes.

    `space`: Ray Tune's samplers (`tune.loguniform`, `tune.grid_search`, …) or constants by name. Keys that begin with
    `plan.` (`plan.training.gradient_accumulation`) are keys of `plan`: the function is then called with the changed
    plan too, `function(params, plan)`; a combination that the plan refuses is a trial that failed, with the reason.
    `workers_per_trial` > 1 runs each trial as a job of that many ranks. Trials of population-based training pass their
    state on by `report(…, checkpoint=directory)` and `resume_directory()`. `fields` are those of `search`, as this
    function took them before there was a `TuningSearch`.
    """
    for name in fields:
        _log.warning("%s", notice("arguments", f"run_tuning({name}=…)", f"TuningSearch({name}=…)"))
    chosen, search = config or RayConfig(), dataclasses.replace(search or TuningSearch(), **fields)
    method = choose_method(search.searcher, search.scheduler)
    for told in method.notices:
        _log.warning("%s", told)
    if plan is None and any(key.startswith(_PLAN_PREFIX) for key in space):
        raise InvalidArgument("the space has keys of a plan, and no plan is given", hint="pass plan=Plan(…)")
    with connected(chosen.address) as ray, ExitStack() as stack:
        from ray import tune

        trial = _trial(function, plan, workers_per_trial, chosen)
        # A job of several ranks places its own actors; the trial itself only waits for them.
        own: dict[str, float] = chosen.bundle if workers_per_trial == 1 else {"CPU": _WAITING_CPUS}
        limit = search.max_concurrent
        if limit is None and workers_per_trial > 1:
            limit = max(1, int(ray.cluster_resources().get("CPU", 1) // (workers_per_trial * chosen.cpus_per_worker)))
        place = storage_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="torsh-tune-"))
        tuner = tune.Tuner(
            tune.with_resources(trial, own),
            param_space=dict(space),
            tune_config=tune.TuneConfig(
                num_samples=search.num_samples,
                scheduler=make_scheduler(method, search, metric=metric, mode=mode),
                search_alg=make_searcher(method, metric=metric, mode=mode, seed=search.seed),
                max_concurrent_trials=limit,
                time_budget_s=search.time_budget_s,
                **({} if method.scheduler != "fifo" else {"metric": metric, "mode": mode}),
            ),
            run_config=tune.RunConfig(name="torsh", storage_path=place, verbose=0),
        )
        return _result(tuner.fit(), metric=metric, mode=mode)


def _trial(
    function: Callable[..., Any], plan: Plan | None, workers: int, config: RayConfig
) -> Callable[[dict[str, Any]], None]:
    """What Ray Tune calls with the values of one trial, in a process of its own."""
    base = None if plan is None else plan.to_dict()

    def run_trial(params: dict[str, Any]) -> None:
        from ray import tune

        def sink(metrics: Mapping[str, Any], checkpoint: str | None) -> None:
            kept = None if checkpoint is None else tune.Checkpoint.from_directory(checkpoint)
            tune.report(dict(metrics), checkpoint=kept)

        args: tuple[Any, ...] = (params,) if base is None else (params, changed_plan(base, params, workers))
        with ExitStack() as stack:
            resumed = tune.get_checkpoint()
            variables: dict[str, str] = {}
            if resumed is not None:
                variables[RESUME_VARIABLE] = stack.enter_context(resumed.as_directory())
            if workers == 1:
                os.environ.pop(RESUME_VARIABLE, None)
                os.environ.update(variables)
                with reporting_to(sink):
                    function(*args)
            else:
                run_training(function, num_workers=workers, args=args, config=config, env=variables, on_report=sink)

    return run_trial


def changed_plan(base: Mapping[str, Any], params: Mapping[str, Any], num_ranks: int) -> Plan:
    """The plan with the keys that `params` has under `plan.`; raises ConfigurationError if it cannot run then."""
    settings = [
        f"{key.removeprefix(_PLAN_PREFIX)}={value}" for key, value in params.items() if key.startswith(_PLAN_PREFIX)
    ]
    with tempfile.TemporaryDirectory(prefix="torsh-plan-") as folder:
        path = Path(folder) / "plan.json"
        Plan.from_dict(base).save(path)
        plan = Plan.compose(path, command_line=settings)
    plan.validate(num_ranks)
    return plan


def _result(grid: Any, *, metric: str, mode: str) -> TuningResult:
    trials = []
    for one in grid:
        metrics = dict(one.metrics or {})
        trials.append(
            TriedValues(
                params=dict(metrics.pop("config", None) or one.config or {}),
                metrics={key: value for key, value in metrics.items() if not key.startswith("time_")},
                num_reports=int(metrics.get("training_iteration", 0)),
                error=None if one.error is None else _why(one.error),
            )
        )
    done = [trial for trial in trials if metric in trial.metrics]
    if not done:
        reasons = sorted({trial.error or "it reported nothing" for trial in trials})
        kind = ConfigurationError if not trials else ProcessFailure
        raise kind(
            f"no trial reported {metric!r}",
            hint="call report({…}) in the function, under this name",
            trials=len(trials),
            reasons="; ".join(reasons[:3]),
        )
    sign = 1 if mode == "min" else -1
    best = min(done, key=lambda trial: sign * float(trial.metrics[metric]))
    return TuningResult(best=best, trials=tuple(trials))


def _why(error: BaseException) -> str:
    """The last line that says something: Ray shows whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "NotAvailable" in line]
    return (named or lines or [type(error).__name__])[-1][:300]
