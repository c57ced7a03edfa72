"""Ray Tune over hyper-parameters and plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.engine_marks import RAY
from torsh_distributed.clusters.ray.search_methods import TuningSearch
from torsh_distributed.clusters.ray.tuning import changed_plan, run_tuning
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, InvalidArgument
from torsh_distributed.plan import Plan

pytestmark = RAY


def parabola(params: dict[str, Any]) -> None:
    from torsh_distributed.clusters.ray import report

    for step in range(1, 9):
        report({"loss": (params["x"] - 3) ** 2 + 1 / step})


def with_plan(params: dict[str, Any], plan: Plan) -> None:
    from torsh_distributed.clusters.ray import report

    report({"loss": float(plan.training.gradient_accumulation)})


def on_ranks(params: dict[str, Any]) -> None:
    import torch

    import torsh_distributed as td
    from torsh_distributed.clusters.ray import report

    td.init()
    total = torch.tensor(float(params["x"]))
    td.all_reduce(total)
    report({"loss": total.item(), "world_size": td.world_size()})


def population(params: dict[str, Any]) -> None:
    """State that is passed on between trials: how far it came, and under which rate it grew."""
    import tempfile

    from torsh_distributed.clusters.ray import report, resume_directory

    folder, value, first = resume_directory(), 0.0, 0
    if folder is not None:
        saved = json.loads(Path(folder, "state.json").read_text())
        value, first = saved["value"], saved["step"]
    for step in range(first, 12):
        value += params["rate"]
        with tempfile.TemporaryDirectory() as kept:
            Path(kept, "state.json").write_text(json.dumps({"value": value, "step": step + 1}))
            report({"value": value}, checkpoint=kept)


def test_keys_of_a_plan_are_applied_and_checked() -> None:
    base = Plan(training={"steps": 7}).to_dict()
    plan = changed_plan(base, {"lr": 0.1, "plan.training.gradient_accumulation": 4}, 2)
    assert (plan.training.gradient_accumulation, plan.training.steps) == (4, 7)
    with pytest.raises(ConfigurationError):
        changed_plan(base, {"plan.mesh.tp": 3}, 2)
    with pytest.raises(ConfigurationError, match="gradient_acumulation"):
        changed_plan(base, {"plan.training.gradient_acumulation": 4}, 2)


def test_a_plan_key_without_a_plan_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no plan is given"):
        run_tuning(with_plan, {"plan.training.gradient_accumulation": 2}, metric="loss")


def test_arguments_that_are_fields_of_the_search_now_are_known_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidArgument, match="no searcher named 'randm'"):
        run_tuning(parabola, {"x": 1}, metric="loss", searcher="randm")
    assert "TuningSearch(searcher=…)" in caplog.text
    with pytest.raises(TypeError, match="surcher"):
        run_tuning(parabola, {"x": 1}, metric="loss", surcher="random")


@pytest.mark.matrix
@pytest.mark.ranks
def test_asha_finds_the_best_value_and_ends_bad_trials_early(ray_cluster: Any) -> None:
    from ray import tune

    found = run_tuning(
        parabola,
        {"x": tune.grid_search([0, 1, 2, 3, 5, 9])},
        metric="loss",
        search=TuningSearch(num_samples=1, max_reports=8),
    )
    assert found.best.params["x"] == 3
    assert len(found.trials) == 6
    assert min(trial.num_reports for trial in found.trials) < 8, "no trial was ended early"


@pytest.mark.matrix
@pytest.mark.ranks
def test_trials_of_plans_and_of_several_ranks(ray_cluster: Any) -> None:
    from ray import tune

    plans = run_tuning(
        with_plan,
        {"plan.training.gradient_accumulation": tune.grid_search([4, 2])},
        metric="loss",
        search=TuningSearch(num_samples=1, scheduler="fifo"),
        plan=Plan(),
    )
    assert plans.best.params == {"plan.training.gradient_accumulation": 2}
    ranks = run_tuning(
        on_ranks,
        {"x": tune.grid_search([5, 4])},
        metric="loss",
        search=TuningSearch(num_samples=1, scheduler="fifo", max_concurrent=1),
        workers_per_trial=2,
    )
    assert ranks.best.metrics["loss"] == 8.0
    assert ranks.best.metrics["world_size"] == 2


@pytest.mark.matrix
@pytest.mark.ranks
def test_population_based_training_passes_state_on(ray_cluster: Any) -> None:
    from ray import tune

    found = run_tuning(
        population,
        {"rate": tune.grid_search([0.1, 1.0])},
        metric="value",
        mode="max",
        search=TuningSearch(
            num_samples=1,
            scheduler="pbt",
            mutations={"rate": [0.1, 1.0]},
            perturb_every=3,
            waits_for_all=True,
            max_reports=12,
        ),
    )
    assert found.best.metrics["value"] == pytest.approx(12.0)
    worst = min(trial.metrics["value"] for trial in found.trials)
    assert worst > 12 * 0.1, "the weak trial went on from the strong one's state"


@pytest.mark.matrix
@pytest.mark.ranks
def test_a_searcher_whose_package_is_missing_names_it(ray_cluster: Any) -> None:
    with pytest.raises(FeatureNotAvailable, match="bayes_opt") as missing:
        run_tuning(parabola, {"x": 1}, metric="loss", search=TuningSearch(searcher="bayesopt", scheduler="fifo"))
    assert missing.value.hint == "pip install bayesian-optimization"
