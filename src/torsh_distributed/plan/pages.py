"""Pages generated from the plan: the reference of its keys, and what goes together."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from torsh_distributed.plan.compatibility.rules import RULES, broken_rules
from torsh_distributed.plan.describing import describe, field_texts, show
from torsh_distributed.plan.plan import Plan
from torsh_distributed.plan.plan_sections import PlanSections
from torsh_distributed.plan.problems import sections_of
from torsh_distributed.plan.sections.compress import METHODS
from torsh_distributed.plan.sections.mesh import MeshConfig
from torsh_distributed.plan.support import GATES, KEY_GATES

_REFERENCE_INTRODUCTION = """\
# Plan reference

Every key of a plan, made from the code by `torsh plan reference`. [The guide](../guides/plan.md) shows how plans are
written, loaded and checked.

A file has one table for each section: `[mesh]` with `dp = 2` under it is the key `mesh.dp`. The same key is
`TORSH_PLAN__MESH__DP` in the environment and `--set mesh.dp=2` on the command line.

The last column says when another key turns this one off; a plan that sets it all the same gets a notice.
[What goes together](compatibility.md) lists the combinations that are refused."""


def render_reference() -> str:
    """The page as Markdown."""
    parts = [_REFERENCE_INTRODUCTION]
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
    yield "| Key | Allowed | Default | Meaning | Has an effect |"
    yield "|---|---|---|---|---|"
    for key, field in section.model_fields.items():
        yield _key_row(f"{name}.{key}", field, field_texts(section)[key])
    if name == "compress":
        yield from _method_lines()


def _key_row(key: str, field: FieldInfo, text: str) -> str:
    meaning = " ".join(text.split())
    cells = [f"`{key}`", describe(field), f"`{show(field.default)}`", meaning, _support(key)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _support(key: str) -> str:
    if key in KEY_GATES:
        gate, off = KEY_GATES[key]
        return f"not while `{gate}` is {_either(off)}"
    return "yes"


def _either(values: tuple[object, ...]) -> str:
    return " or ".join(map(show, values))


def _method_lines() -> Iterator[str]:
    yield ""
    yield "A method may be followed by a colon and a number (`topk:0.01`):"
    yield ""
    yield "| Method | Number | Default | From | To |"
    yield "|---|---|---|---|---|"
    for method, kind in METHODS.items():
        number = kind.number
        if number is None:
            yield f"| `{method}` | none | | | |"
        else:
            yield f"| `{method}` | {number.meaning} | {number.default:g} | {number.least:g} | {number.most:g} |"


Document = Mapping[str, Mapping[str, Any]]
"""Sections of keys, as in a plan file."""

_INTRODUCTION = """\
# What goes together

Which axes and features a plan can combine, made from the code by `torsh plan compatibility`. Every cell is the answer
of the same rules that `torsh plan validate`, `Plan.validate` and `parallelize` check: *yes*, or *no* with the numbers
of the [rules](#rules) that refuse the combination. The table of rules gives the reason and the way out of each.

Some combinations depend on the model, such as experts or tied weights: they are checked when the model is read."""

_LAYOUTS: dict[str, Document] = {
    "replicas: `dp`": {"mesh": {"dp": 2}},
    "ZeRO-1: `shard`, `shard_optimizer`": {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
    "ZeRO-2: `shard`, `shard_grad_op`": {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_grad_op"}},
    "ZeRO-3: `shard`": {"mesh": {"dp": 1, "shard": 2}},
    "replicas of shards: `dp`, `shard`": {"mesh": {"dp": 2, "shard": 2}},
    "tensor: `dp`, `tp`": {"mesh": {"dp": 2, "tp": 2}},
    "pipeline: `dp`, `pp`": {"mesh": {"dp": 2, "pp": 2}},
    "experts: `dp`, `ep`": {"mesh": {"dp": 2, "ep": 2}},
    "context: `dp`, `cp`": {"mesh": {"dp": 2, "cp": 2}},
    "sharded experts: `shard`, `ep`": {"mesh": {"dp": 1, "shard": 2, "ep": 2}},
    "sharded stages: `shard`, `pp`": {"mesh": {"dp": 1, "shard": 2, "pp": 2}},
}
"""Layouts, each in its smallest form."""

_FEATURES: dict[str, Document] = {
    "bf16": {"precision": {"dtype": "bf16"}},
    "fp16": {"precision": {"dtype": "fp16"}},
    "`precision.reduce_dtype`": {"precision": {"reduce_dtype": "bf16"}},
    "recomputed activations": {"activation": {"strategy": "uniform"}},
    "compression": {"compress": {"method": "int8"}},
    "PowerSGD, sketch": {"compress": {"method": "powersgd"}},
    "error feedback ef21": {"compress": {"method": "int8", "error_feedback": "ef21"}},
    "`distributed.algorithm`": {"distributed": {"algorithm": "ring"}},
    "`distributed.deterministic`": {"distributed": {"deterministic": True}},
    "`distributed.rate_limit_gbps`": {"distributed": {"rate_limit_gbps": 1.0}},
    "offload of optimizer state": {"offload": {"enabled": True, "params": False, "grads": False}},
    "offload of everything": {"offload": {"enabled": True}},
}


def render_compatibility() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION, _features_by_layout(), _axis_by_axis(), _features_together(), _rules()]
    return "\n\n".join(parts) + "\n"


def _features_by_layout() -> str:
    lines = ["## Features by layout", "", *_header(["Feature", *_LAYOUTS])]
    for name, feature in _FEATURES.items():
        lines.append(_row([name, *(_answer(layout, feature) for layout in _LAYOUTS.values())]))
    return "\n".join(lines)


def _axis_by_axis() -> str:
    """Two axes of the mesh at a time, with every other setting at its default."""
    axes = list(MeshConfig.model_fields)
    lines = ["## Axes with each other", "", *_header(["Axis", *(f"`{axis}`" for axis in axes)])]
    for one in axes:
        cells = (_answer({"mesh": {"dp": 1, one: 2, other: 2}}) if other != one else "" for other in axes)
        lines.append(_row([f"`{one}`", *cells]))
    return "\n".join(lines)


def _features_together() -> str:
    """Pairs of features that do not go together on plain replicas."""
    lines = ["## Features with each other", "", "On replicas, everything above goes together, except:", ""]
    for (one, first), (other, second) in itertools.combinations(_FEATURES.items(), 2):
        if set(first) & set(second):
            continue  # two values of one section: a choice, not a combination
        answer = _answer({"mesh": {"dp": 2}}, first, second)
        if answer != "yes":
            lines.append(f"- {one} with {other}: {answer}")
    return "\n".join(lines)


def _rules() -> str:
    lines = ["## Rules", "", *_header(["", "Rule", "Keys", "Reason", "Way out"])]
    for number, rule in enumerate(RULES, start=1):
        keys = ", ".join(f"`{key}`" for key in rule.keys)
        lines.append(_row([f'<a id="{rule.name}"></a>{number}', rule.name, keys, rule.reason, rule.way_out]))
    return "\n".join(lines)


def _answer(*documents: Document) -> str:
    merged: dict[str, dict[str, Any]] = {}
    for document in documents:
        for section, keys in document.items():
            merged.setdefault(section, {}).update(keys)
    broken = list(broken_rules(PlanSections.model_validate(merged)))
    numbers = ", ".join(f"[{RULES.index(rule) + 1}](#{rule.name})" for rule in broken)
    return f"no: {numbers}" if broken else "yes"


def _header(cells: list[str]) -> Iterator[str]:
    yield _row(cells)
    yield "|" + "---|" * len(cells)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
