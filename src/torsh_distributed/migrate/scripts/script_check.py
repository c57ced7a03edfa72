"""What a script asks of other libraries for distributed training, and our counterpart of each call; nothing is run.

Reads the syntax tree. A name is followed to where it was imported from, under whatever name, so `hvd.allreduce` and
`from torch.nn.parallel import DistributedDataParallel as DDP` are both found, and methods of what such a call returned.
Imports no torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from torsh_distributed.migrate.report import KeyVerdict
from torsh_distributed.migrate.scripts.counterparts import COUNTERPARTS, LIBRARIES, METHODS, NOT_HERE
from torsh_distributed.migrate.scripts.keyword_notes import keyword_verdicts
from torsh_distributed.migrate.scripts.script_names import ScriptNames, parsed

_AS_TORCH = "runs unchanged under `torsh run`, on our backends"


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
    keywords: tuple[KeyVerdict, ...] = ()
    """What becomes of its keywords, for calls of torch's."""


def check_script(source: str, name: str = "script.py") -> list[FoundCall]:
    """The distributed calls in a script, in order: of torch, Accelerate, Lightning, Horovod, DeepSpeed, FairScale.

    Raises InvalidArgument if it does not parse.
    """
    tree = parsed(source, name)
    names = ScriptNames(tree)
    found: list[FoundCall] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            full = names.full_name(node.func)
            if full is not None:
                found += _described(node, full)
            method = names.method(node.func)
            if method is not None:
                found += _described_method(node.lineno, *method)
    return sorted(found, key=lambda one: one.line)


def _described(node: ast.Call, full: str) -> Iterator[FoundCall]:
    line = node.lineno
    missing = next((note for part, note in NOT_HERE.items() if full == part or full.startswith(f"{part}.")), None)
    library = full.partition(".")[0]
    if missing is not None:
        yield FoundCall(line=line, call=full, counterpart="", note=missing)
    elif library in LIBRARIES:
        yield FoundCall(line=line, call=full, counterpart="", note=LIBRARIES[library])
    elif full in COUNTERPARTS:
        counterpart, note = COUNTERPARTS[full]
        keywords = keyword_verdicts(full, node)
        yield FoundCall(line=line, call=full, counterpart=counterpart, note=note, keywords=keywords)
    elif full.startswith(("torch.distributed.", "torch.nn.parallel.")):
        yield FoundCall(line=line, call=full, counterpart="", note=_AS_TORCH)


def _described_method(line: int, made_by: str, method: str) -> Iterator[FoundCall]:
    known = METHODS.get(made_by, {}).get(method)
    if known is not None:
        counterpart, note = known
        yield FoundCall(line=line, call=f"{made_by}.{method}", counterpart=counterpart, note=note)
    elif made_by.startswith("horovod.") and method in ("synchronize", "skip_synchronize"):
        yield FoundCall(line=line, call=f"{made_by}.{method}", counterpart="", note=LIBRARIES["horovod"])
