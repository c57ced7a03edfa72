"""Which Python, torch and torsh-distributed a node or a rank runs; those of one job must not differ in them."""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_NAMES = {"python": "Python", "torch": "torch", "torsh": "torsh-distributed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSoftware:
    """Versions as installed; empty where a package is missing."""

    python: str
    torch: str
    torsh: str


@cache
def own_software() -> NodeSoftware:
    """What this interpreter has, read without importing torch."""
    return NodeSoftware(
        python=platform.python_version(), torch=_installed("torch"), torsh=_installed("torsh-distributed")
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def software_differences(ours: NodeSoftware, theirs: NodeSoftware) -> list[str]:
    """What would keep the two from one job, in words; empty if nothing does.

    Patch levels of Python work together, and so do builds of one torch for different accelerators.
    """
    found = []
    for field in fields(NodeSoftware):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if comparable(field.name, here) != comparable(field.name, there):
            found.append(f"{_NAMES[field.name]} is {there or 'not installed'} there and {here or 'missing'} on node 0")
    return found


def comparable(name: str, text: str) -> str:
    """The part of a version in which processes of one job must agree."""
    return ".".join(text.split(".")[:2]) if name == "python" else text.partition("+")[0]
