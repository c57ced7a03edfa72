"""The change to a script that keeps its meaning, as a diff: calls with a plain counterpart are rewritten."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from torsh_distributed.errors import InvalidArgument

_SAME = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.utils.data.DistributedSampler": "torch.utils.data.distributed.DistributedSampler",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (
        "torch.distributed.fsdp.FullyShardedDataParallel"
    ),
    "torch.distributed.distributed_c10d.init_process_group": "torch.distributed.init_process_group",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "accelerate.accelerator.Accelerator": "accelerate.Accelerator",
    "pytorch_lightning.Trainer": "lightning.pytorch.Trainer",
    "lightning.Trainer": "lightning.pytorch.Trainer",
    "lightning.pytorch.trainer.Trainer": "lightning.pytorch.Trainer",
    "lightning.Fabric": "lightning.fabric.Fabric",
    "lightning_fabric.Fabric": "lightning.fabric.Fabric",
}
"""Further names of one thing."""


def parsed(source: str, name: str) -> ast.Module:
    """The syntax tree of a script. Raises InvalidArgument if it has none."""
    try:
        return ast.parse(source, name)
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument("the script is not Python", script=name, reason=str(error)) from error


class ScriptNames:
    """The imports of a script, and names assigned from calls: `model = DDP(…)` makes `model.no_sync` known."""

    def __init__(self, tree: ast.Module) -> None:
        self._imported = dict(_imports(tree))
        self._made: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                full = self.full_name(node.value.func)
                if full is not None:
                    self._made.update(dict.fromkeys(_first_names(node.targets), full))
            elif isinstance(node, ast.With):
                for item in node.items:
                    full = self.full_name(item.context_expr.func) if isinstance(item.context_expr, ast.Call) else None
                    if full is not None and isinstance(item.optional_vars, ast.Name):
                        self._made[item.optional_vars.id] = full

    def full_name(self, node: ast.expr) -> str | None:
        """The name under which its library documents what `node` names; None if it was not imported."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._imported:
            return None
        full = ".".join([self._imported[node.id], *reversed(parts)])
        return _SAME.get(full, full)

    def method(self, node: ast.expr) -> tuple[str, str] | None:
        """What made the object, and the method called on it: (`accelerate.Accelerator`, `prepare`)."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self._made:
            return self._made[node.value.id], node.attr
        return None


def _first_names(targets: list[ast.expr]) -> Iterator[str]:
    """Of `a, b = call()` the first: `deepspeed.initialize` returns its engine there."""
    for target in targets:
        inner = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
        if isinstance(inner, ast.Name):
            yield inner.id


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names in the script, and what each was imported as."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (top, top) if alias.asname is None else (alias.asname, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


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
