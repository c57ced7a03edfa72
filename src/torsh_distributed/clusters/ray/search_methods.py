"""Searchers and schedulers of Ray Tune, told apart: a searcher proposes values, a scheduler ends trials early.

HyperBand and population-based training are schedulers, although lists of "search algorithms" often have them; BOHB is
a searcher that works with a scheduler of its own only.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument

SEARCHERS = {
    "random": None,
    "grid": None,
    "bayesopt": ("bayes_opt", "bayesian-optimization"),
    "bohb": ("hpbandster", "hpbandster ConfigSpace"),
    "hyperopt": ("hyperopt", "hyperopt"),
    "optuna": ("optuna", "optuna"),
}
"""Each with the package that it needs, and what to install."""

SCHEDULERS = ("fifo", "asha", "hyperband", "median_stopping", "pbt", "bohb_hyperband")
_OTHER_NAMES = {
    "basic_variant": "random",
    "population_based_training": "pbt",
    "async_hyperband": "asha",
    "bayes_opt": "bayesopt",
    "median": "median_stopping",
}


@dataclass(frozen=True, slots=True)
class SearchMethod:
    """A searcher and a scheduler that work together."""

    searcher: str
    scheduler: str
    notices: tuple[str, ...] = ()
    """What was asked for under another name, in words."""


@dataclass(frozen=True, kw_only=True)
class TuningSearch:
    """Which values are tried, how many, and which trials are ended early."""

    num_samples: int = 8
    searcher: str = "random"
    """Proposes values: random, grid, bayesopt, bohb, hyperopt or optuna."""
    scheduler: str = "asha"
    """Ends trials early: fifo (none), asha, hyperband, median_stopping or pbt."""
    seed: int = 0
    max_concurrent: int | None = None
    """Trials at the same time; as many as the cluster has room for by default."""
    max_reports: int = 100
    """After so many reports a trial is done."""
    time_budget_s: float | None = None
    mutations: Mapping[str, Any] | None = None
    """For population-based training (pbt): the values that may change while trials run."""
    perturb_every: int = 4
    """For pbt: reports between two changes."""
    waits_for_all: bool = False
    """For pbt: no trial goes on before all have come that far, so that speed decides nothing."""


def choose_method(searcher: str, scheduler: str) -> SearchMethod:
    """The two parts, from names that may be in the wrong place; raises InvalidArgument where they contradict.

    A scheduler given as searcher is moved, with a notice, unless another scheduler is given too.
    """
    wanted, ending = _plain(searcher), _plain(scheduler)
    notices: list[str] = []
    if wanted in SCHEDULERS:
        if ending not in ("fifo", wanted):
            raise InvalidArgument(
                f"{wanted!r} is a scheduler, and the scheduler is {ending!r} already",
                hint="give one scheduler, and a searcher such as random",
                searcher=searcher,
                scheduler=scheduler,
            )
        notices.append(f"{wanted!r} is a scheduler: it ends trials early; values are drawn at random")
        wanted, ending = "random", wanted
    if wanted not in SEARCHERS:
        raise _unknown("searcher", searcher, list(SEARCHERS))
    if ending not in SCHEDULERS:
        raise _unknown("scheduler", scheduler, list(SCHEDULERS))
    if wanted == "bohb" and ending != "bohb_hyperband":
        if ending not in ("fifo", "hyperband"):
            raise InvalidArgument(
                f"the searcher 'bohb' works with its own HyperBand, not with {ending!r}",
                hint="leave out the scheduler",
                scheduler=scheduler,
            )
        notices.append("the searcher 'bohb' takes its own HyperBand as scheduler")
        ending = "bohb_hyperband"
    if ending == "bohb_hyperband" and wanted != "bohb":
        raise InvalidArgument("the scheduler 'bohb_hyperband' is for the searcher 'bohb'", searcher=searcher)
    if ending == "pbt" and wanted not in ("random", "grid"):
        raise InvalidArgument(
            "population-based training chooses values itself",
            hint="leave the searcher at random",
            searcher=searcher,
        )
    return SearchMethod(wanted, ending, tuple(notices))


def _plain(name: str) -> str:
    lower = name.strip().lower()
    return _OTHER_NAMES.get(lower, lower)


def _unknown(kind: str, name: str, known: list[str]) -> InvalidArgument:
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return InvalidArgument(
        f"there is no {kind} named {name!r}",
        hint=f"did you mean {near[0]!r}?" if near else f"{kind}s: {', '.join(known)}",
    )


def make_searcher(method: SearchMethod, *, metric: str, mode: str, seed: int) -> Any:
    """Ray Tune's searcher; None for values drawn by Tune itself."""
    need = SEARCHERS[method.searcher]
    if need is None:
        return None
    package, install = need
    if importlib.util.find_spec(package) is None:
        raise FeatureNotAvailable(
            f"the searcher {method.searcher!r} needs the package {package!r}", hint=f"pip install {install}"
        )
    match method.searcher:
        case "bayesopt":
            from ray.tune.search.bayesopt import BayesOptSearch

            return BayesOptSearch(metric=metric, mode=mode, random_state=seed)
        case "bohb":
            from ray.tune.search.bohb import TuneBOHB

            return TuneBOHB(metric=metric, mode=mode, seed=seed)
        case "hyperopt":
            from ray.tune.search.hyperopt import HyperOptSearch

            return HyperOptSearch(metric=metric, mode=mode, random_state_seed=seed)
        case _:
            from ray.tune.search.optuna import OptunaSearch

            return OptunaSearch(metric=metric, mode=mode, seed=seed)


def make_scheduler(method: SearchMethod, search: TuningSearch, *, metric: str, mode: str) -> Any:
    """Ray Tune's scheduler; time is counted in reports."""
    from ray.tune import schedulers

    # Some of them count seconds if they are not told otherwise.
    common = {"metric": metric, "mode": mode, "time_attr": "training_iteration"}
    match method.scheduler:
        case "fifo":
            return schedulers.FIFOScheduler()
        case "asha":
            return schedulers.ASHAScheduler(**common, max_t=search.max_reports, grace_period=1, reduction_factor=2)
        case "hyperband":
            return schedulers.HyperBandScheduler(**common, max_t=search.max_reports)
        case "median_stopping":
            return schedulers.MedianStoppingRule(**common, grace_period=1)
        case "bohb_hyperband":
            return schedulers.HyperBandForBOHB(**common, max_t=search.max_reports)
        case _:
            if not search.mutations:
                raise InvalidArgument(
                    "population-based training needs the values that may change while trials run",
                    hint='TuningSearch(scheduler="pbt", mutations={"lr": [0.1, 0.01]})',
                )
            return schedulers.PopulationBasedTraining(
                **common,
                perturbation_interval=search.perturb_every,
                hyperparam_mutations=dict(search.mutations),
                log_config=False,
                synch=search.waits_for_all,
            )
