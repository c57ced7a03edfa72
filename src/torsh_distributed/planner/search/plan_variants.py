"""Plans that differ in what a search decides, made without the checks of `Plan.replace`: many, and few are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_distributed.plan import Plan
from torsh_distributed.planner.search.layouts import (
    RECOMPUTING,
    SHARDING,
    Mesh,
    accumulations,
    even_parts,
    pipelines,
)


@dataclass(frozen=True)
class Variant:
    """One plan of a search: what it changes, and the plan with these changes, unchecked."""

    changes: Mapping[str, Mapping[str, Any]]
    plan: Plan
    kind: tuple[object, ...]
    """What decides whether it is legal, but for numbers: axes in use, how it shards, the schedule."""


@dataclass(eq=False)
class PlanVariants:
    """Makes the variants of `base`. A section is checked once, when it is made; combinations are not."""

    base: Plan
    has_blocks: bool
    is_batch_free: bool = False
    """Whether a batch may become larger, so that it divides evenly."""
    _sections: dict[object, Any] = field(default_factory=dict)

    def on(self, mesh: Mesh, local: int) -> Iterator[Variant]:
        """The variants on a mesh whose ranks get `local` samples each, the one that saves the least memory first."""
        in_use = tuple(axis for axis, degree in mesh.items() if degree > 1)
        for strategy in SHARDING if mesh["shard"] > 1 else ("full_shard",):
            for pipeline in pipelines(mesh["pp"], local):
                kind = (in_use, strategy, pipeline.get("schedule"))
                for _, recomputing in RECOMPUTING if self.has_blocks else RECOMPUTING[:1]:
                    for training in self._passes(mesh, local, pipeline.get("num_microbatches", 1)):
                        changes: dict[str, Mapping[str, Any]] = {"mesh": mesh, "activation": recomputing}
                        changes["training"] = training
                        if pipeline:
                            changes["pipeline"] = pipeline
                        if mesh["shard"] > 1:
                            changes["fsdp"] = {"strategy": strategy}
                        yield Variant(changes, self._plan(changes), kind)

    def _passes(self, mesh: Mesh, local: int, num_microbatches: int) -> Iterator[dict[str, Any]]:
        """In how many passes a rank does its samples; with the batch, where that is free."""
        if not self.is_batch_free:
            yield from (
                {"gradient_accumulation": passes} for passes in (accumulations(local) if mesh["pp"] == 1 else (1,))
            )
            return
        whole = [(1, -(-local // num_microbatches) * num_microbatches)]
        for passes, samples in even_parts(local) if mesh["pp"] == 1 else whole:
            batch = passes * samples * mesh["dp"] * mesh["shard"] * mesh["ep"]
            yield {"batch_size": batch, "gradient_accumulation": passes}

    def _plan(self, changes: Mapping[str, Mapping[str, Any]]) -> Plan:
        sections = {name: self._section(name, tuple(keys.items())) for name, keys in changes.items()}
        return self.base.model_copy(update=sections)

    def _section(self, name: str, keys: tuple[tuple[str, Any], ...]) -> Any:
        found = self._sections.get((name, keys))
        if found is None:
            found = self._sections[name, keys] = getattr(self.base, name).replace(**dict(keys))
        return found
