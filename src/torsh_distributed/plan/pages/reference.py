"""The reference page of the plan, made from the models: docs/reference/plan.md is this text."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from torsh_distributed.plan.describing.allowed_values import describe
from torsh_distributed.plan.describing.explanation import show
from torsh_distributed.plan.describing.field_texts import field_texts
from torsh_distributed.plan.key_paths import sections_of
from torsh_distributed.plan.plan import Plan
from torsh_distributed.plan.sections.compress import METHODS
from torsh_distributed.plan.support import GATES, KEY_GATES, NOT_YET

_INTRODUCTION = """\
# Plan reference

Every key of a plan, made from the code by `torsh plan reference`. [The guide](../guides/plan.md) shows how plans are
written, loaded and checked.

A file has one table for each section: `[mesh]` with `dp = 2` under it is the key `mesh.dp`. The same key is
`TORSH_PLAN__MESH__DP` in the environment and `--set mesh.dp=2` on the command line.

The last column says whether this version honours the key. One that is *not yet* honoured must stay at its default: a
plan that sets it is refused before training, never ignored. A key that another one turns off is reported.
[What goes together](compatibility.md) lists the combinations that are refused."""


def render() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    parts += ["\n".join(_section_lines(name, section)) for name, section in sections_of(Plan).items()]
    return "\n\n".join(parts) + "\n"


def _section_lines(name: str, section: type[BaseModel]) -> Iterator[str]:
    yield f"## `[{name}]`: {section.__name__}"
    yield ""
    yield inspect.cleandoc(section.__doc__ or "")
    if name in GATES:
        gate, off = GATES[name]
        yield ""
        yield f"The section has no effect while `{gate}` is {_either(off)}."
    yield ""
    yield "| Key | Allowed | Default | Meaning | Honoured |"
    yield "|---|---|---|---|---|"
    for key, field in section.model_fields.items():
        yield _row(f"{name}.{key}", field, field_texts(section)[key])
    if name == "compress":
        yield from _method_lines()


def _row(key: str, field: FieldInfo, text: str) -> str:
    meaning = " ".join(text.split())
    cells = [f"`{key}`", describe(field), f"`{show(field.default)}`", meaning, _support(key)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _support(key: str) -> str:
    if key in KEY_GATES:
        gate, off = KEY_GATES[key]
        return f"not while `{gate}` is {_either(off)}"
    if key not in NOT_YET:
        return "not yet" if key.partition(".")[0] in NOT_YET else "yes"
    values = NOT_YET[key]
    return "not yet" if values is None else f"yes, except {', '.join(values)}"


def _either(values: tuple[object, ...]) -> str:
    return " or ".join(map(show, values))


def _method_lines() -> Iterator[str]:
    yield ""
    yield "A method may be followed by a colon and a number (`topk:0.01`):"
    yield ""
    yield "| Method | Number | Default | From | To |"
    yield "|---|---|---|---|---|"
    for method, number in METHODS.items():
        if number is None:
            yield f"| `{method}` | none | | | |"
        else:
            yield f"| `{method}` | {number.meaning} | {number.default:g} | {number.least:g} | {number.most:g} |"
