"""The plan: one object that says how a model is trained, on how many ranks and split how."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, Unpack

from pydantic import PrivateAttr, ValidationError
from typing_extensions import override

from torsh_distributed import upward
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.compatibility.rules import clashes_in, impossible_in
from torsh_distributed.plan.describing import ExplainedKey, Explanation, show
from torsh_distributed.plan.plan_sections import DEFAULTS, PlanArguments, PlanSections
from torsh_distributed.plan.problems import Problem, configuration_error, keys_of, problems_of
from torsh_distributed.plan.reading import files
from torsh_distributed.plan.reading.value_sources import (
    SourceValues,
    merge,
    values_from_command_line,
    values_from_document,
    values_from_environment,
    values_from_file,
)
from torsh_distributed.plan.sections.mesh import MeshConfig
from torsh_distributed.plan.support import gate_of, status_of

AUTO = "auto"
"""In TORSH_PLAN and `--plan`: no file, `parallelize` chooses."""


class PlanDifference(NamedTuple):
    """A key under which two plans differ."""

    key: str
    mine: object
    theirs: object


class Plan(PlanSections):
    """How a model is trained: sections of keys, each with a default that leaves training as it is.

    Immutable and checked: a plan that exists has no unknown key, no wrong value and no impossible combination;
    `validate` says whether it can run. Two plans are equal if their values are, wherever those came from.
    """

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _name: str = PrivateAttr(default="plan")  # what errors call it: its file, where it has one

    def __init__(self, **values: Unpack[PlanArguments]) -> None:
        given = _without_short_form(dict(values))
        super().__init__(**given)
        self._sources = dict.fromkeys(_keys_given(given), "argument")

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # see Section

    @override
    def find_problems(self) -> Iterator[Problem]:
        return impossible_in(self)

    # --- where plans come from ---------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The plan in a .toml, .json, .yaml or .yml file."""
        return cls._from_values(values_from_file(Path(path), cls), where=str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The plan from what `to_dict` returned, or from sections of keys written by hand."""
        return cls._from_values(values_from_document(values, cls, source="argument"), where="plan")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The plan in the environment: the file in TORSH_PLAN, overridden by TORSH_PLAN__SECTION__KEY.

        Left out, `environ` is this process's environment.
        """
        return cls.compose(environ=os.environ if environ is None else environ)

    @classmethod
    def compose(
        cls,
        path: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        command_line: Iterable[str] = (),
    ) -> Self:
        """A plan from a file, overridden by the environment, then by `section.key=value` of a command line.

        Without `path`, the file is the one that TORSH_PLAN names in `environ`, if any. `auto` is not a file:
        `parallelize` chooses then, and these keys are what its choice leaves alone.
        """
        variables = environ or {}
        chosen = path or variables.get("TORSH_PLAN") or None
        chosen = None if str(chosen) == AUTO else chosen
        sources = [values_from_file(Path(chosen), cls)] if chosen else []
        sources += [values_from_environment(variables, cls), values_from_command_line(command_line, cls)]
        return cls._from_values(merge(sources), where=str(chosen or "plan"))

    @staticmethod
    def from_deepspeed(source: str | Path | Mapping[str, Any], **options: Any) -> tuple[Plan, Any]:
        """The plan of a DeepSpeed config, and a `MigrationReport` with a verdict on every key of it.

        Options: `world_size`, `fills` for keys that are "auto", `version` of DeepSpeed. See `migrate.deepspeed`, which
        is looked up by name: it knows plans, and plans do not know it.
        """
        found: tuple[Plan, Any] = upward.load(upward.DEEPSPEED_READER)(source, **options)
        return found

    @staticmethod
    def auto(model: Any, **options: Any) -> Plan:
        """The plan with the shortest predicted step among all legal ones that fit, for a model on any device.

        Options: `world_size`; `machine`, a description by name such as "h100" or by file (left out: this machine,
        measured); `base`, a plan with batch, formats and all else that stays; `optimizer`, `memory_bytes`, `sequence`,
        `example`, `is_simple`. See `planner.search`. Raises InvalidArgument, with the nearest plan, if none fits.
        """
        found: Plan = upward.load(upward.BEST_PLAN)(model, **options)
        return found

    @classmethod
    def _from_values(cls, given: SourceValues, *, where: str) -> Self:
        problems = list(given.problems)
        plan: Self | None = None
        try:
            plan = cls.model_validate(given.values)
        except ValidationError as error:
            problems += problems_of(error, cls)
        if problems or plan is None:
            raise configuration_error((_with_source(problem, given.sources) for problem in problems), where=where)
        plan._sources, plan._name = dict(given.sources), where
        return plan

    @override
    def replace(self, **changes: Any) -> Self:
        """A validated copy: sections whole or as keys to change (`training={"steps": 5}`), degrees as `dp=4`."""
        given = _without_short_form(changes)
        sections: dict[str, Any] = {name: getattr(self, name) for name in self.model_fields_set}
        for name, value in given.items():
            merges = isinstance(value, Mapping) and name in type(self).model_fields
            sections[name] = {**getattr(self, name).model_dump(exclude_unset=True), **value} if merges else value
        changed = type(self)(**sections)
        whole = tuple(f"{name}." for name, value in given.items() if not isinstance(value, Mapping))
        kept = {key: source for key, source in self._sources.items() if not key.startswith(whole)}
        changed._sources = kept | dict.fromkeys(_keys_given(given), "argument")
        changed._name = self._name
        return changed

    # --- what they return ----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every key of every section, as JSON-ready values."""
        return self.model_dump(mode="json")

    def save(self, path: str | Path, *, with_defaults: bool = True) -> None:
        """Write every key to a .toml, .json, .yaml or .yml file, atomically; `load` gives an equal plan.

        Without defaults: only the keys that differ from them, which is what a person goes on to edit.
        """
        files.write(
            Path(path), self.to_dict() if with_defaults else self.model_dump(mode="json", exclude_defaults=True)
        )

    @property
    def hash(self) -> str:
        """SHA-256 of all values: equal for equal plans, in every process and format. Stored in checkpoints."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def diff(self, other: Plan) -> tuple[PlanDifference, ...]:
        """The keys under which this plan and `other` differ."""
        pairs = ((key, self.value(key), other.value(key)) for key in keys_of(Plan))
        return tuple(PlanDifference(key, mine, theirs) for key, mine, theirs in pairs if mine != theirs)

    def explain(self) -> Explanation:
        """Every key with its value, where that came from, and whether this version honours it."""
        return Explanation(
            tuple(
                ExplainedKey(key, self.value(key), self._sources.get(key, "default"), status_of(self, key))
                for key in keys_of(Plan)
            )
        )

    # --- whether they can run ----------------------------------------------------------------------------------

    def notices(self) -> tuple[str, ...]:
        """A sentence for every key set away from its default that another key turns off."""
        found = ((key, gate_of(self, key)) for key in keys_of(Plan) if self._is_changed(key))
        return tuple(
            f"{key} = {show(self.value(key))} has no effect while {gate} is {show(self.value(gate))}"
            for key, gate in found
            if gate is not None
        )

    def resolve(self, world_size: int) -> Self:
        """This plan for a world of `world_size` ranks: no degree of its mesh is -1."""
        resolved = self.replace(mesh=self.mesh.resolve(world_size))
        resolved._sources = dict(self._sources)  # the user did not set the degree that replaces -1
        return resolved

    @override
    def validate(self, world_size: int | None = None) -> None:  # type: ignore[override]  # pydantic 1's, deprecated
        """Raise ConfigurationError with every reason why this plan cannot run, in a world of that size if given.

        A plan that passes for a world is not refused there later, except for what the model, the devices or the ranks
        do not allow.
        """
        problems: list[Problem] = []
        resolved = self
        if world_size is not None:
            try:
                resolved = self.model_copy(update={"mesh": self.mesh.resolve(world_size)})
            except ConfigurationError as error:
                problems.append(Problem("mesh", error.message, error.hint or ""))
        problems += clashes_in(resolved)
        if problems:
            raise configuration_error(problems, where=self._name)

    def _is_changed(self, key: str) -> bool:
        """Whether the key is away from its default. A key given at its default asks for nothing: `save` writes all."""
        return self.value(key) != DEFAULTS.value(key)

    # Pydantic would compare the sources too.
    @override
    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Plan) else NotImplemented

    @override
    def __repr__(self) -> str:
        set_apart: dict[str, dict[str, object]] = {}
        for key in filter(self._is_changed, keys_of(Plan)):
            section, _, name = key.partition(".")
            set_apart.setdefault(section, {})[name] = self.value(key)
        return f"Plan({', '.join(f'{section}={keys!r}' for section, keys in set_apart.items())})"

    __str__ = __repr__

    @override
    def __hash__(self) -> int:
        return int(self.hash[:16], 16)


def _without_short_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """`dp=2` as `mesh={"dp": 2}`."""
    degrees = {name: value for name, value in values.items() if name in MeshConfig.model_fields}
    rest = {name: value for name, value in values.items() if name not in degrees}
    if degrees and "mesh" in rest:
        raise ConfigurationError(
            f"the mesh is given twice: as mesh and as {', '.join(degrees)}",
            hint="give the degrees in one way: Plan(dp=2, tp=2) or Plan(mesh=MeshConfig(dp=2, tp=2))",
        )
    return {**rest, "mesh": degrees} if degrees else rest


def _keys_given(sections: Mapping[str, Any]) -> Iterator[str]:
    for section, value in sections.items():
        keys = value if isinstance(value, Mapping) else value.model_fields_set
        yield from (f"{section}.{key}" for key in keys)


def _with_source(problem: Problem, sources: Mapping[str, str]) -> Problem:
    """Name the variable or option that a bad value came from; the error already names a file."""
    source = sources.get(problem.key, "")
    if not source.startswith(("environment", "command line")):
        return problem
    return Problem(problem.key, f"{problem.text} (from {source})", problem.hint)
