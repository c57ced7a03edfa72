"""Facts about the run that a checkpoint carries: versions, the commit of the program, the plan, the model's config."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

PRETRAINED = "_pretrained"
"""Among a checkpoint's values: what `from_pretrained` needs beside the tensors, by the name of the saved object."""


def versions() -> dict[str, str]:
    """Of the libraries that the state depends on."""
    torch = sys.modules.get("torch")
    return _own_versions() if torch is None else {**_own_versions(), "torch": str(torch.__version__)}


@functools.cache
def _own_versions() -> dict[str, str]:
    """Kept: our own version is read from the installed package, which takes milliseconds."""
    from torsh_distributed import __version__

    return {"torsh-distributed": __version__, "python": platform.python_version()}


def hash_of_plan(plan: dict[str, Any]) -> str:
    """The same for equal plans, whatever file they came from."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]


def pretrained_facts(model: nn.Module, shared: Callable[[], Mapping[str, str]]) -> dict[str, Any] | None:
    """For an export: a transformers model's config and its further names of tensors (`shared`); None for others."""
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if not callable(getattr(config, "to_json_string", None)) or hasattr(model, "peft_config"):
        return None
    from torsh_distributed.parallel.models.user_class import user_class

    return {
        "config": config.to_json_string(),
        "generation": None if generation is None else generation.to_json_string(),
        "architecture": user_class(model).__name__,
        "shared": dict(shared()),
    }


@functools.cache
def git_commit() -> str | None:
    """The commit of the repository that the program was started in, without running git; None outside of one."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        git = folder / ".git"
        try:
            if git.is_file():  # a worktree: the file names its directory
                git = (folder / git.read_text().removeprefix("gitdir:").strip()).resolve()
            if not git.is_dir():
                continue
            return _commit(git)
        except OSError:
            return None
    return None


def _commit(git: Path) -> str | None:
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / "commondir"
    for place in (git, (git / common.read_text().strip()).resolve() if common.exists() else git):
        if (place / name).exists():
            return (place / name).read_text().strip()
        packed = place / "packed-refs"
        for line in packed.read_text().splitlines() if packed.exists() else ():
            commit, _, ref = line.partition(" ")
            if ref == name:
                return commit
    return None
