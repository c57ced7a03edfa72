"""One simulated step of the ranks that say most: computing, communication and waiting on a time axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from torsh_distributed.parallel.mesh.layout import MESH_ORDER, MeshLayout
from torsh_distributed.plan import Plan
from torsh_distributed.planner.forecast.simulated_steps import SimulatedClocks, Spreads, run_step
from torsh_distributed.planner.machine.step_time import StepPhases

if TYPE_CHECKING:
    from torsh_distributed.parallel.pipeline.schedule import Action, ActionKind, Timeline

_PP = MESH_ORDER.index("pp")
_Place = tuple[int, ...]
"""Of a rank, along each axis of the mesh."""


def picture_of_step(phases: StepPhases, plan: Plan, *, spreads: Spreads, seed: int = 0) -> Timeline:
    """The first step that `simulate_steps` draws with the same seed.

    Of pipelines, all ranks of the one that has its gradients last; else the slowest rank, a typical and the fastest.
    """
    from torsh_distributed.parallel.pipeline.schedule import Timeline

    ranks = SimulatedClocks(plan, spreads, seed)
    _, ready = run_step(ranks, phases, plan)
    shown = _pipeline_that_is_last(ready) if plan.mesh.pp > 1 else _slowest_typical_fastest(ranks.computed)
    # The same seed draws the same step again, now with a record of these ranks.
    record = _ShownRanks(list(shown.values()))
    run_step(SimulatedClocks(plan, spreads, seed, record), phases, plan)
    layout = MeshLayout(plan.mesh)
    names = (f"rank {layout.rank_at(**dict(zip(MESH_ORDER, place, strict=True)))}" for place in shown.values())
    rows = tuple(f"{name}, {what} " if what else f"{name} " for name, what in zip(names, shown, strict=True))
    return Timeline(tuple(record.actions), len(shown), rows, "waiting")


def _slowest_typical_fastest(computed: np.ndarray) -> dict[str, _Place]:
    """Ranks by how long they compute; one if all take the same time."""
    order = np.argsort(computed, axis=None, kind="stable")
    if computed.max() == computed.min():
        return {"all alike": _place(int(order[0]), computed.shape)}
    slowest, typical, fastest = int(order[-1]), int(order[len(order) // 2]), int(order[0])
    chosen = {"the slowest": slowest, "typical": typical, "the fastest": fastest}
    # Of two ranks the typical one is one of the others.
    return {what: _place(one, computed.shape) for what, one in chosen.items() if what != "typical" or len(order) > 2}


def _pipeline_that_is_last(ready: np.ndarray) -> dict[str, _Place]:
    last = _place(int(ready.argmax()), ready.shape)
    return {f"pp {stage}": (*last[:_PP], stage, *last[_PP + 1 :]) for stage in range(ready.shape[_PP])}


def _place(index: int, shape: Sequence[int]) -> _Place:
    return tuple(int(one) for one in np.unravel_index(index, shape))


class _ShownRanks:
    """Records the actions of some ranks."""

    def __init__(self, places: list[_Place]) -> None:
        self._places = places
        self.actions: list[Action] = []

    def add(self, rank: int | None, kind: ActionKind, microbatch: int, start: np.ndarray, end: np.ndarray) -> None:
        """An action of the ranks at a place along pp, or of all (None)."""
        from torsh_distributed.parallel.pipeline.schedule import Action

        for row, place in enumerate(self._places):
            if rank is not None and place[_PP] != rank:
                continue
            at = place if rank is None else (*place[:_PP], 0, *place[_PP + 1 :])
            self.actions.append(Action(row, place[_PP], kind, microbatch, float(start[at]), float(end[at])))
