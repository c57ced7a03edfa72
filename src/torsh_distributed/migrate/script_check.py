"""What a script asks of other libraries for distributed training, and our counterpart of each call; nothing is run.

Reads the syntax tree. A name is followed to where it was imported from, under whatever name, so `hvd.allreduce` and
`from torch.nn.parallel import DistributedDataParallel as DDP` are both found. Imports no torch.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from torsh_distributed.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCall:
    """A call that matters for distributed training."""

    line: int
    call: str
    """The full name of what is called."""
    counterpart: str
    """What to write instead; empty if it stays."""
    note: str
    """What it means here."""


_AS_HOROVOD = "runs unchanged under `torsh run --as horovod`"
_AS_TORCH = "runs unchanged under `torsh run`, on our backends"

COUNTERPARTS: dict[str, tuple[str, str]] = {
    "torch.distributed.init_process_group": ("td.init()", "finds its place under any launcher; picks the backend"),
    "torch.distributed.destroy_process_group": ("td.destroy_process_group()", "also called at exit"),
    "torch.nn.parallel.DistributedDataParallel": (
        "td.DistributedDataParallel(model)",
        "the same class, with compression and checks; or td.parallelize(model, optimizer, plan)",
    ),
    "torch.distributed.fsdp.FullyShardedDataParallel": (
        "td.FullyShardedDataParallel(model)",
        "on FSDP2; or a plan with [fsdp] for td.parallelize",
    ),
    "torch.distributed.fsdp.fully_shard": ("", "a plan with [fsdp] for td.parallelize does this"),
    "torch.utils.data.distributed.DistributedSampler": (
        "td.DistributedSampler(dataset)",
        "continues where a checkpoint stopped; the Engine's batches() need none",
    ),
    "torch.distributed.all_reduce": ("td.all_reduce(tensor)", 'the reduction is a word: op="sum"'),
    "torch.distributed.broadcast": ("td.broadcast(tensor, src)", "the same"),
    "torch.distributed.all_gather": ("td.all_gather(tensor)", "returns the list"),
    "torch.distributed.all_gather_object": ("td.all_gather_object(value)", "plain values, without pickle"),
    "torch.distributed.barrier": ("td.barrier()", "names the missing ranks after the deadline"),
    "torch.distributed.get_rank": ("td.rank()", "the same"),
    "torch.distributed.get_world_size": ("td.world_size()", "the same"),
    "torch.distributed.is_initialized": ("td.is_initialized()", "the same"),
    "torch.multiprocessing.spawn": ("td.spawn(function, nprocs)", "results come back, failures say why"),
    "torch.distributed.checkpoint.save": ("engine.save(path)", "or td.CheckpointManager"),
    "torch.distributed.checkpoint.load": ("engine.load(path)", "or td.CheckpointManager; any world size"),
}
"""Calls with a counterpart, by the name under which torch documents them."""

_SAME = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "torch.utils.data.DistributedSampler": "torch.utils.data.distributed.DistributedSampler",
}
_REWRITTEN = {
    "torch.distributed.init_process_group": "td.init()",
    "torch.distributed.destroy_process_group": "td.destroy_process_group()",
    "torch.distributed.get_rank": "td.rank()",
    "torch.distributed.get_world_size": "td.world_size()",
    "torch.distributed.barrier": "td.barrier()",
}
"""Calls that the proposed change rewrites, if they have no arguments that it would lose."""
_MAY_HAVE_ARGUMENTS = frozenset({"torch.distributed.init_process_group"})


def check_script(source: str, name: str = "script.py") -> list[FoundCall]:
    """The calls of Horovod and torch.distributed in a script, in order. Raises InvalidArgument if it does not parse."""
    tree = _parsed(source, name)
    imported = _imports(tree)
    found: list[FoundCall] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            full = _full_name(node.func, imported)
            if full is not None:
                found += _described(node.lineno, full)
    return sorted(found, key=lambda one: one.line)


def proposed_change(source: str, name: str = "script.py") -> str:
    """The script with the calls that have a plain counterpart rewritten, as a unified diff; empty if there are none."""
    tree = _parsed(source, name)
    imported = _imports(tree)
    lines = source.splitlines(keepends=True)
    for node in sorted(_rewritable(tree, imported), key=lambda call: (-call.lineno, -call.col_offset)):
        full = _full_name(node.func, imported)
        assert full is not None, "it was found by this name"
        line = lines[node.lineno - 1].encode()
        end = node.end_col_offset
        lines[node.lineno - 1] = (line[: node.col_offset] + _REWRITTEN[full].encode() + line[end:]).decode()
    changed = "".join(lines)
    if changed == source:
        return ""
    first = next(
        (node.lineno for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) and not _is_future(node)), 1
    )
    after = changed.splitlines(keepends=True)
    after.insert(first - 1, "import torsh_distributed as td\n")
    return "".join(difflib.unified_diff(source.splitlines(keepends=True), after, name, f"{name} (proposed)"))


def _parsed(source: str, name: str) -> ast.Module:
    try:
        return ast.parse(source, name)
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument("the script is not Python", script=name, reason=str(error)) from error


def _is_future(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _imports(tree: ast.Module) -> dict[str, str]:
    """Names in the script, and what each was imported as."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname is None:
                    top = alias.name.partition(".")[0]
                    names[top] = top
                else:
                    names[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _full_name(node: ast.expr, imported: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in imported:
        return None
    full = ".".join([imported[node.id], *reversed(parts)])
    return _SAME.get(full, full)


def _described(line: int, full: str) -> Iterator[FoundCall]:
    if full.startswith("horovod."):
        yield FoundCall(line=line, call=full, counterpart="", note=_AS_HOROVOD)
    elif full in COUNTERPARTS:
        counterpart, note = COUNTERPARTS[full]
        yield FoundCall(line=line, call=full, counterpart=counterpart, note=note)
    elif full.startswith(("torch.distributed.", "torch.nn.parallel.")):
        yield FoundCall(line=line, call=full, counterpart="", note=_AS_TORCH)


def _rewritable(tree: ast.Module, imported: dict[str, str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node.lineno != node.end_lineno:
            continue
        full = _full_name(node.func, imported)
        has_arguments = bool(node.args or node.keywords)
        if full in _REWRITTEN and (full in _MAY_HAVE_ARGUMENTS or not has_arguments):
            yield node
