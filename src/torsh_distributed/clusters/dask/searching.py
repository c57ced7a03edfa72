"""`run_search`: hyper-parameters tried as futures of a Dask cluster, one rank or several for each trial.

A space maps names to lists (each value is as likely as the others), to functions of a `random.Random` that draw one, or
to constants. With successive halving all trials get a small budget, the better part a larger one, and so on.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from torsh_distributed.clusters.dask.dask_connection import client_of
from torsh_distributed.clusters.dask.run_on_dask import run_training
from torsh_distributed.errors import InvalidArgument, ProcessFailure

SearchName = Literal["grid", "random", "successive_halving"]
_METHODS = ("grid", "random", "successive_halving")


@dataclass(frozen=True, kw_only=True)
class SearchTrial:
    """What was tried, with which budget, and what came of it."""

    params: dict[str, Any]
    budget: int | None
    score: float | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best trial of the largest budget, and all of them in the order of their ends."""

    best: SearchTrial
    trials: tuple[SearchTrial, ...]


def run_search(
    client: Any,
    objective: Callable[..., float],
    space: Mapping[str, Any],
    *,
    method: SearchName = "random",
    num_trials: int = 16,
    mode: Literal["min", "max"] = "min",
    workers_per_trial: int = 1,
    min_budget: int = 1,
    max_budget: int = 8,
    reduction: int = 2,
    seed: int = 0,
) -> SearchResult:
    """Call `objective(**params)` for values of the space, many at a time; it returns the number to make small or large.

    `grid` tries every combination of the lists, `random` draws `num_trials`. `successive_halving` passes `budget` too
    (steps, epochs: the objective's choice) and keeps one of `reduction` trials from budget to budget. With
    `workers_per_trial` > 1 the objective runs on that many ranks as under `run_training`, and rank 0's number counts.
    A trial that raises is kept with its error; if all do, ProcessFailure is raised.
    """
    if method not in _METHODS:
        raise InvalidArgument(f"method must be one of {', '.join(_METHODS)}", method=method)
    if num_trials < 1 or workers_per_trial < 1 or reduction < 2 or not 1 <= min_budget <= max_budget:
        raise InvalidArgument(
            "num_trials and workers_per_trial are at least 1, reduction at least 2, min_budget at most max_budget",
            num_trials=num_trials,
            workers_per_trial=workers_per_trial,
            reduction=reduction,
        )
    sign = 1.0 if mode == "min" else -1.0
    tried: list[SearchTrial] = []
    with client_of(client) as connected:
        candidates = list(_grid(space)) if method == "grid" else list(_draws(space, num_trials, seed))
        budgets = _budgets(min_budget, max_budget, reduction) if method == "successive_halving" else [None]
        for budget in budgets:
            round_ = _run_round(connected, objective, candidates, budget, workers_per_trial)
            tried += round_
            ranked = sorted((one for one in round_ if one.score is not None), key=lambda one: sign * (one.score or 0.0))
            if not ranked:
                raise ProcessFailure(
                    "every trial failed", hint="the first error is below", reason=round_[0].error, trials=len(round_)
                )
            candidates = [one.params for one in ranked[: max(1, math.ceil(len(ranked) / reduction))]]
    return SearchResult(best=ranked[0], trials=tuple(tried))


def _run_round(
    client: Any,
    objective: Callable[..., float],
    candidates: Sequence[Mapping[str, Any]],
    budget: int | None,
    workers_per_trial: int,
) -> list[SearchTrial]:
    """All candidates with one budget."""
    further = {} if budget is None else {"budget": budget}
    if workers_per_trial == 1:
        futures = {
            client.submit(_score, objective, {**params, **further}, pure=False): dict(params) for params in candidates
        }
        from distributed import as_completed

        return [
            _ended(futures[future], budget, future.result) for future in as_completed(list(futures), loop=client.loop)
        ]
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
    teams = [
        workers[first : first + workers_per_trial]
        for first in range(0, len(workers) - workers_per_trial + 1, workers_per_trial)
    ]
    if not teams:
        raise InvalidArgument(
            f"a trial needs {workers_per_trial} workers, and the Dask cluster has {len(workers)}",
            hint="scale the cluster, or lower workers_per_trial",
        )
    shares = [list(candidates[number :: len(teams)]) for number in range(len(teams))]

    def run_team(team: Sequence[str], share: Sequence[Mapping[str, Any]]) -> list[SearchTrial]:
        done = []
        for params in share:
            arguments = {**params, **further}

            def measure(arguments: Mapping[str, Any] = arguments) -> float:
                return float(run_training(client, objective, num_workers=len(team), workers=team, kwargs=arguments)[0])

            done.append(_ended(dict(params), budget, measure))
        return done

    with ThreadPoolExecutor(max_workers=len(teams), thread_name_prefix="torsh-search") as pool:
        return list(itertools.chain.from_iterable(pool.map(run_team, teams, shares)))


def _score(objective: Callable[..., float], arguments: Mapping[str, Any]) -> float:
    return float(objective(**arguments))


def _ended(params: dict[str, Any], budget: int | None, measure: Callable[[], float]) -> SearchTrial:
    try:
        score = float(measure())
    except Exception as error:  # whatever the objective raises is the trial's result
        return SearchTrial(params=params, budget=budget, score=None, error=f"{type(error).__name__}: {error}")
    if math.isnan(score):
        return SearchTrial(params=params, budget=budget, score=None, error="the objective returned nan")
    return SearchTrial(params=params, budget=budget, score=score)


def _budgets(least: int, most: int, reduction: int) -> list[int]:
    """Budgets of the rounds, each `reduction` times the one before, the last one whole."""
    found = [most]
    while found[-1] // reduction >= least:
        found.append(found[-1] // reduction)
    return found[::-1]


def _grid(space: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    drawn = [name for name, values in space.items() if callable(values)]
    if drawn:
        raise InvalidArgument(
            f"a grid needs lists, and {drawn[0]!r} is a function", hint="give its values as a list, or search at random"
        )
    names = list(space)
    values = [list(one) if isinstance(one, list | tuple) else [one] for one in space.values()]
    for combination in itertools.product(*values):
        yield dict(zip(names, combination, strict=True))


def _draws(space: Mapping[str, Any], count: int, seed: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(seed)
    for _ in range(count):
        yield {name: _draw(values, generator) for name, values in space.items()}


def _draw(values: Any, generator: random.Random) -> Any:
    if callable(values):
        return values(generator)
    return generator.choice(list(values)) if isinstance(values, list | tuple) else values
