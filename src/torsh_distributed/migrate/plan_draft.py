"""A plan that is being translated from another library's settings, key by key, with the verdict on each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from torsh_distributed.errors import ConfigurationError, InvalidArgument, IoError
from torsh_distributed.migrate.report import KeyVerdict, MigrationReport, Verdict, shown, unknown_key
from torsh_distributed.plan.plan import Plan
from torsh_distributed.plan.problems import Problem, configuration_error


def read_document(path: Path) -> dict[str, Any]:
    """The table in the file. Raises IoError if it cannot be read, ConfigurationError if it is not one."""
    from torsh_distributed.plan.reading import yaml_format
    from torsh_distributed.plan.reading.limits import MalformedError, read_limited

    if not path.is_file():
        raise IoError(f"there is no file {path}", hint="name a config file", path=str(path))
    try:
        text = read_limited(path).decode("utf-8-sig")
        document = json.loads(text) if path.suffix == ".json" else yaml_format.parse(text)
    except (MalformedError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", path=str(path)) from error
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path} is not a table of settings", path=str(path))
    return document


class ForeignConfig:
    """Another library's settings in a dict, or in a file that holds one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A dict of sections."""
        return cls(values)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """A JSON or YAML file."""
        return cls(read_document(Path(path)))


Reader = Callable[["PlanDraft", str, Any], None]
"""Takes one key with its value into a draft."""


class PlanDraft:
    """Collects keys of a plan and verdicts; `finish` makes both of them, or one error with all that is wrong."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._sections: dict[str, dict[str, Any]] = {}
        self._entries: list[KeyVerdict] = []
        self._problems: list[Problem] = []
        self._at_end: list[tuple[Reader, str, Any]] = []

    # --- verdicts -----------------------------------------------------------------------------------------------

    def honour(self, key: str, value: Any, plan_key: str, plan_value: Any, reason: str = "") -> None:
        """The key means this key of a plan."""
        self.put(plan_key, plan_value)
        self._add(key, value, Verdict.HONOURED, f"{plan_key} = {shown(plan_value)}", reason)

    def accept(self, key: str, value: Any, means: str, reason: str = "") -> None:
        """The key has this meaning here, without a key of a plan."""
        self._add(key, value, Verdict.HONOURED, means, reason)

    def match(self, key: str, value: Any, means: str, reason: str) -> None:
        """The result is the same by other means."""
        self._add(key, value, Verdict.EQUIVALENT, means, reason)

    def hint(self, key: str, value: Any, reason: str, means: str = "") -> None:
        """The key changes no result."""
        self._add(key, value, Verdict.HINT, means, reason)

    def refuse(self, key: str, value: Any, reason: str) -> None:
        """What the key asks for is not done here; `reason` says why, and what to write instead."""
        self._add(key, value, Verdict.REFUSED, "", reason)

    def problem(self, key: str, text: str, hint: str = "") -> None:
        """The settings are wrong by the other library's own rules."""
        self._problems.append(Problem(key, text, hint))

    def unknown(self, key: str, known: Mapping[str, Any] | list[str]) -> None:
        """The other library does not have this key either."""
        self._problems.append(unknown_key(key, known, kind=self.kind))

    def _add(self, key: str, value: Any, verdict: Verdict, means: str, reason: str) -> None:
        self._entries.append(KeyVerdict(key, value, verdict, means, reason))

    # --- the plan -----------------------------------------------------------------------------------------------

    def put(self, plan_key: str, value: Any) -> None:
        """Set a key of the plan, such as `mesh.shard`."""
        section, _, name = plan_key.rpartition(".")
        self._sections.setdefault(section, {})[name] = value

    def get(self, plan_key: str) -> Any:
        """What a key was set to; None if it was not."""
        section, _, name = plan_key.rpartition(".")
        return self._sections.get(section, {}).get(name)

    def read(self, values: Mapping[str, Any], table: Mapping[str, Reader], prefix: str = "") -> None:
        """Take every key of `values` through its reader in `table`; `prefix` is the section's name with a dot."""
        for name, value in values.items():
            if name in table:
                table[name](self, f"{prefix}{name}", value)
            else:
                self.unknown(f"{prefix}{name}", list(table))

    def at_end(self, reader: Reader, key: str, value: Any) -> None:
        """Read a key after all others: what becomes of it depends on keys that may come later."""
        self._at_end.append((reader, key, value))

    def verdicts(self) -> tuple[KeyVerdict, ...]:
        """What became of every key, once all were read."""
        waiting, self._at_end = self._at_end, []
        for reader, key, value in waiting:
            reader(self, key, value)
        return tuple(self._entries)

    def finish(self) -> tuple[Plan, MigrationReport]:
        """The plan and the verdicts. Raises ConfigurationError with every problem found."""
        report = MigrationReport(self.kind, self.verdicts())
        if self._problems:
            raise configuration_error(self._problems, where=f"the {self.kind} settings")
        try:
            return Plan.from_dict(self._sections), report
        except ConfigurationError as error:
            raise ConfigurationError(
                f"the {self.kind} settings make no plan: {error.message}", hint=error.hint, **error.context
            ) from error


def for_world(
    found: tuple[Plan, MigrationReport],
    *,
    world_size: int | None = None,
    fills: Mapping[str, Any] | None = None,
    version: str | None = None,
) -> tuple[Plan, MigrationReport]:
    """The translation of a file, checked for this number of ranks. These files have no "auto" and no versions."""
    if fills or version:
        raise InvalidArgument(
            f"{found[1].kind} settings have no values to fill in, and one version",
            hint="leave out --fill and --version",
        )
    if world_size is not None:
        found[0].mesh.resolve(world_size)
    return found


# --- readers that many tables use ---------------------------------------------------------------------------------


def to_key(plan_key: str, change: Callable[[Any], Any] = lambda value: value, reason: str = "") -> Reader:
    """The value goes to a key of the plan, perhaps in another form."""

    def read(draft: PlanDraft, key: str, value: Any) -> None:
        draft.honour(key, value, plan_key, change(value), reason)

    return read


def by_table(plan_key: str, table: Mapping[Any, Any]) -> Reader:
    """The value goes to a key of the plan as the table says; others are an error that names those it has."""

    def read(draft: PlanDraft, key: str, value: Any) -> None:
        word = value.upper() if isinstance(value, str) else value
        if word in table:
            draft.honour(key, value, plan_key, table[word])
        else:
            draft.problem(key, f"{key} is {shown(value)}", f"it may be: {', '.join(map(str, table))}")

    return read


def in_host_memory(draft: PlanDraft, key: str, value: Any) -> None:
    """Parameters, gradients and optimizer state in host memory, of replicas or of shards."""
    draft.put("offload.enabled", True)
    for other in ("offload.grads", "offload.optimizer_state"):
        draft.put(other, True)
    draft.honour(key, value, "offload.params", True, "the update then runs on the host")


def optimizer_in_host_memory(draft: PlanDraft, key: str, value: Any) -> None:
    """Optimizer state in host memory; parameters and gradients only if another key says so."""
    draft.put("offload.enabled", True)
    for other in ("offload.params", "offload.grads"):
        if draft.get(other) is None:
            draft.put(other, False)
    draft.honour(key, value, "offload.optimizer_state", True, "the update then runs on the host")


def tuning(reason: str, means: str = "") -> Reader:
    """The key changes no result."""

    def read(draft: PlanDraft, key: str, value: Any) -> None:
        draft.hint(key, value, reason, means)

    return read


def same_by(means: str, reason: str) -> Reader:
    """The result is the same by other means."""

    def read(draft: PlanDraft, key: str, value: Any) -> None:
        draft.match(key, value, means, reason)

    return read


def stays(means: str, reason: str = "") -> Reader:
    """The key keeps its meaning outside of the plan."""

    def read(draft: PlanDraft, key: str, value: Any) -> None:
        draft.accept(key, value, means, reason)

    return read


def refused(reason: str, *, unless: tuple[Any, ...] = (None, False)) -> Reader:
    """Not done here, unless the value asks for nothing."""

    def read(draft: PlanDraft, key: str, value: Any) -> None:
        if value in unless:
            draft.match(key, value, "", "it asks for what happens anyway")
        else:
            draft.refuse(key, value, reason)

    return read
