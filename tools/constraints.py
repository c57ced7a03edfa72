"""Writes the exact versions of every use into constraints/: runtime, dev, services, release.

`make constraints` takes the newest that fit; `--keep` takes the versions that are written there already and only adds
and drops lines. pip resolves the largest use; the others are the parts of it that they reach, so that a package has one
version everywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from wheels import TOOLS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "constraints"
OURS = "torsh-distributed"
USES = {
    "services": ("dev,services", "everything that a test may need, as in `.ci/run`"),
    "dev": ("dev", "`make test`, `make lint` and `make docs`"),
    "runtime": ("plot", "`make train`"),
}
"""Use to the extras that it installs and who uses it; the largest first."""


def main() -> None:
    """Resolve every use and write its file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="keep the versions that are written there")
    options = parser.parse_args()
    pins: dict[str, str] = {}
    if options.keep:
        for path in FOLDER.glob("*.txt"):
            pins |= dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE))
    everything = resolve([f"{ROOT}[{USES['services'][0]}]"], pins)
    for use, (extras, who) in USES.items():
        write(use, who, everything, reached(everything, [f"{OURS}[{extras}]"]))
    tools = resolve(list(TOOLS), pins)
    write("release", "`make wheel`", tools, reached(tools, list(TOOLS)))


def resolve(asked: list[str], pins: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Package to its metadata, as pip would install it; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder) / "pins.txt", Path(folder) / "report.json"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
        subprocess.run([*pip, "--ignore-installed", "-c", constraints, "--report", report, *asked], check=True)
        installed = json.loads(report.read_text())["install"]
    return {canonicalize_name(each["metadata"]["name"]): each["metadata"] for each in installed}


def reached(packages: dict[str, dict[str, Any]], asked: list[str]) -> dict[str, set[str]]:
    """Package to the packages that need it, of all that the asked ones reach."""
    found: dict[str, set[str]] = {}
    waiting = [(Requirement(text), "") for text in asked]
    seen = set()
    while waiting:
        need, parent = waiting.pop()
        name = canonicalize_name(need.name)
        found.setdefault(name, set()).add(parent)
        for extra in (*need.extras, ""):
            if (name, extra) not in seen:
                seen.add((name, extra))
                needs = [Requirement(text) for text in packages[name].get("requires_dist", ())]
                waiting += [(each, name) for each in needs if is_wanted(each, extra)]
    return found


def is_wanted(need: Requirement, extra: str) -> bool:
    """Whether a requirement holds here, for an extra or for none."""
    if need.marker is None:
        return not extra
    return need.marker.evaluate({"extra": extra})


def write(use: str, who: str, packages: dict[str, dict[str, Any]], needs: dict[str, set[str]]) -> None:
    """One file: a line for each package, with the packages that need it."""
    lines = [f"# Exact versions for {who}. Made by `make constraints`; do not edit."]
    for name in sorted(needs.keys() - {OURS}):
        parents = sorted(needs[name] - {""})
        shown = ", ".join(parents[:3]) + (", …" if len(parents) > 3 else "")
        version = packages[name]["version"].partition("+")[0]
        lines.append(f"{name}=={version}" + (f"  # of {shown}" if parents else ""))
    (FOLDER / f"{use}.txt").write_text("\n".join(lines) + "\n")
    print(f"{use}: {len(lines) - 1} packages")


if __name__ == "__main__":
    main()
