"""The change to a script that keeps its meaning, as a diff: calls with a plain counterpart are rewritten."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from torsh_distributed.migrate.scripts.script_names import ScriptNames, parsed

_REWRITTEN = {
    "torch.distributed.init_process_group": "td.init()",
    "torch.distributed.destroy_process_group": "td.destroy_process_group()",
    "torch.distributed.get_rank": "td.rank()",
    "torch.distributed.get_world_size": "td.world_size()",
    "torch.distributed.is_initialized": "td.is_initialized()",
    "torch.distributed.barrier": "td.barrier()",
}
"""Calls that are rewritten if they have no arguments that would be lost."""
_MAY_HAVE_ARGUMENTS = frozenset({"torch.distributed.init_process_group"})
_NEEDS_INIT = ("accelerate.Accelerator", "accelerate.PartialState", "transformers.TrainingArguments")
"""Calls that start a process group of their own unless there is one."""
_DDP = "torch.nn.parallel.DistributedDataParallel"
_DDP_FIELDS = {
    "broadcast_buffers": "broadcast_buffers",
    "bucket_cap_mb": "max_bucket_size_mb",
    "find_unused_parameters": "find_unused_parameters",
    "gradient_as_bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph",
}
"""Keywords of torch's DDP, and fields of td.DdpConfig."""
_NOT_NEEDED = ("device_ids", "output_device")


@dataclass(frozen=True, slots=True)
class _Edit:
    """A piece of the source, in bytes, and what stands there afterwards."""

    start: int
    end: int
    text: str


def proposed_change(source: str, name: str = "script.py") -> str:
    """The script with the calls that have a plain counterpart rewritten, as a unified diff; empty if there are none."""
    tree = parsed(source, name)
    names = ScriptNames(tree)
    starts = _line_starts(source)
    edits = [*_rewritten(tree, names, source, starts), *_with_init(tree, names, source, starts)]
    if not edits:
        return ""
    first = next((node for node in tree.body if _is_plain_import(node)), None)
    where = starts[(first.lineno if first is not None else _after_docstring(tree)) - 1]
    edits.append(_Edit(where, where, "import torsh_distributed as td\n"))
    data = source.encode()
    for edit in sorted(edits, key=lambda one: (-one.start, -one.end)):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    before, after = source.splitlines(keepends=True), data.decode().splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, name, f"{name} (proposed)"))


def _rewritten(tree: ast.Module, names: ScriptNames, source: str, starts: list[int]) -> Iterator[_Edit]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        full = names.full_name(node.func)
        has_arguments = bool(node.args or node.keywords)
        text = None
        if full in _REWRITTEN and (full in _MAY_HAVE_ARGUMENTS or not has_arguments):
            text = _REWRITTEN[full]
        elif full == _DDP:
            text = _ddp(node, source)
        if text is not None:
            start, end = _span(node, starts)
            yield _Edit(start, end, text)


def _ddp(node: ast.Call, source: str) -> str | None:
    """td.DistributedDataParallel with the same settings; None if there are some that it does not have."""
    if len(node.args) != 1 or isinstance(node.args[0], ast.Starred):
        return None
    fields, group = [], ""
    for keyword in node.keywords:
        value = ast.get_source_segment(source, keyword.value)
        if keyword.arg in _DDP_FIELDS:
            fields.append(f"{_DDP_FIELDS[keyword.arg]}={value}")
        elif keyword.arg == "process_group":
            group = f", group={value}"
        elif keyword.arg not in _NOT_NEEDED:
            return None
    config = f", td.DdpConfig({', '.join(fields)})" if fields else ""
    return f"td.DistributedDataParallel({ast.get_source_segment(source, node.args[0])}{config}{group})"


def _with_init(tree: ast.Module, names: ScriptNames, source: str, starts: list[int]) -> Iterator[_Edit]:
    """`td.init()` before the first statement that would start a process group of its own."""
    calls = [names.full_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if "torch.distributed.init_process_group" in calls:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign | ast.Expr | ast.AnnAssign):
            continue
        inside = (one for one in ast.walk(node) if isinstance(one, ast.Call))
        if any(names.full_name(one.func) in _NEEDS_INIT for one in inside):
            where = starts[node.lineno - 1]
            yield _Edit(where, where, f"{' ' * node.col_offset}td.init()\n")
            return


def _line_starts(source: str) -> list[int]:
    """Where each line begins, in bytes."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _span(node: ast.Call, starts: list[int]) -> tuple[int, int]:
    assert node.end_lineno is not None, "a parsed call has an end"
    assert node.end_col_offset is not None, "a parsed call has an end"
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _is_plain_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    return isinstance(node, ast.Import)


def _after_docstring(tree: ast.Module) -> int:
    """The first line that a statement may stand on."""
    return tree.body[1].lineno if ast.get_docstring(tree) is not None and len(tree.body) > 1 else 1
