"""What is wrong with a plan: every problem found, reported at once, in the user's spelling."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import reprlib
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan.describing import choices, describe


def section_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """The model of a field that holds a section; None for a plain value."""
    kind = field.annotation if field is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def section_at(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel]:
    """The innermost section that `path` leads into."""
    for name in path:
        model = section_of(model.model_fields.get(name)) or model
    return model


def field_at(path: Sequence[str], model: type[BaseModel]) -> FieldInfo | None:
    """The field that `path` leads to, if there is one."""
    return section_at(path[:-1], model).model_fields.get(path[-1]) if path else None


def sections_of(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Name to model of every section of a plan."""
    found = ((name, section_of(field)) for name, field in model.model_fields.items())
    return {name: section for name, section in found if section is not None}


@functools.cache
def keys_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Every full key of a plan, in the order of its sections."""
    return tuple(f"{name}.{key}" for name, section in sections_of(model).items() for key in section.model_fields)


FOUND = "plan_problem"
"""The kind of pydantic error that carries what `Section.find_problems` found."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing wrong: the key, a sentence with keys written in full, and what to do."""

    key: str
    text: str
    hint: str = ""


def configuration_error(problems: Iterable[Problem], *, where: str) -> ConfigurationError:
    """All `problems` of `where` (a file, "the environment", a class) as one error."""
    found = list(problems)
    if len(found) == 1:
        return ConfigurationError(f"{where}: {found[0].text}", hint=found[0].hint or None, key=found[0].key)
    lines = [f"  {problem.text}" + (f" ({problem.hint})" if problem.hint else "") for problem in found]
    return ConfigurationError(
        "\n".join([f"{where} has {len(found)} problems:", *lines]),
        hint="fix these lines; `torsh plan schema` lists every key, `torsh plan validate FILE` checks again",
    )


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """What pydantic found, in the words of a plan."""
    found: list[Problem] = []
    for detail in error.errors(include_url=False):
        if detail["type"] == FOUND:
            prefix = "".join(f"{part}." for part in detail["loc"])
            found += [dataclasses.replace(problem, key=prefix + problem.key) for problem in detail["ctx"]["problems"]]
        else:
            found.append(_problem_of(detail, model))
    return found


def _problem_of(detail: ErrorDetails, model: type[BaseModel]) -> Problem:
    path = [str(part) for part in detail["loc"] if not isinstance(part, int)]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        return unknown_key(path, model)
    field = field_at(path, model)
    if field is None or section_of(field) is not None:
        names = ", ".join(section_at(path, model).model_fields)
        return Problem(
            key, f"{key} must be a section with keys of its own ({names}); got {reprlib.repr(detail['input'])}"
        )
    last = detail["loc"][-1]
    got = f"element {last} is" if isinstance(last, int) else "got"
    text = f"{key} must be {describe(field)}; {got} {reprlib.repr(detail['input'])}"
    return Problem(key, text, did_you_mean(str(detail["input"]), choices(field)))


def unknown_key(path: list[str], model: type[BaseModel]) -> Problem:
    """The problem of a key that does not exist, with the name the user probably meant."""
    key, name = ".".join(path), path[-1]
    parent = section_at(path[:-1], model)
    inside = f"[{'.'.join(path[:-1])}]" if path[:-1] else "a plan"
    homes = [full.partition(".")[0] for full in keys_of(model) if full.endswith(f".{name}")]
    if len(homes) == 1:
        hint = f"{name} belongs in [{homes[0]}]"
    else:
        elsewhere = {full.partition(".")[2]: full for full in keys_of(model)}
        near = _nearest(name, elsewhere, cutoff=0.8)
        hint = did_you_mean(name, parent.model_fields) or (f"did you mean {elsewhere[near]}?" if near else "")
    return Problem(key, f"{key} is not a key of {inside}", hint or "known keys: " + ", ".join(parent.model_fields))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that proposes the nearest known word; empty if none is near."""
    near = _nearest(name, known, cutoff=0.6)
    return f"did you mean {near}?" if near else ""


def _nearest(name: str, known: Iterable[str], *, cutoff: float) -> str:
    def likeness(word: str) -> tuple[float, bool]:
        """Equal ratios are common among short names (dpp: dp, pp); the first letter then decides."""
        ratio = difflib.SequenceMatcher(None, name.lower(), word.lower()).ratio()
        return ratio, word[:1].lower() == name[:1].lower()

    nearest = max(known, key=likeness, default="")
    return nearest if likeness(nearest)[0] >= cutoff else ""
