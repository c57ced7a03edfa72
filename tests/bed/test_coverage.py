"""What the tests of a package reach: which package a commit measures, and when a share has fallen."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.bed.world import ROOT


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "coverage_by_folder.py"))


def test_commits_choose_every_package_in_turn(tool: dict[str, Any]) -> None:
    known = tool["folders"]()
    assert {"top", "comm", "compress", "plan"} <= set(known)
    assert [tool["folder_of"](f"{number:08x}abc", known) for number in range(len(known))] == known


def test_what_is_kept_is_of_packages_that_exist(tool: dict[str, Any]) -> None:
    assert json.loads(tool["KEPT"].read_text()).keys() <= set(tool["folders"]())


def test_a_share_that_fell_is_told_and_one_that_moved_a_little_is_not(tool: dict[str, Any]) -> None:
    kept = {"lines": 90.0, "branches": 80.0}
    assert tool["fallen"]("plan", {"lines": 88.6, "branches": 85.0}, kept) == []
    (told,) = tool["fallen"]("plan", {"lines": 95.0, "branches": 77.0}, kept)
    assert told.startswith("plan: 77.0 % of branches are reached, 80.0 % before")
    assert tool["fallen"]("new", {"lines": 1.0, "branches": 1.0}, None) == []


def test_files_are_counted_together_and_one_without_branches_misses_none(tool: dict[str, Any]) -> None:
    one = tool["Reached"](lines=10, lines_run=9, branches=4, branches_run=1)
    assert tool["total"]([one, one]).shares == {"lines": 90.0, "branches": 25.0}
    assert tool["Reached"](lines=2, lines_run=2).shares == {"lines": 100.0, "branches": 100.0}


@pytest.mark.ranks
def test_processes_and_files_that_nobody_imports_count(tool: dict[str, Any], tmp_path: Path) -> None:
    package, tests = tmp_path / "src" / "pack", tmp_path / "tests" / "pack"
    for folder in (package, tests):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text("def run(flag):\n    if flag:\n        return 1\n    return 2\n")
    (package / "unused.py").write_text("a = 1\nb = 2\n")
    (tests / "test_own.py").write_text(
        "import os, subprocess, sys\nfrom pack.own import run\n"
        "def test_by_a_child():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        run(True)\n        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "    subprocess.run([sys.executable, '-c', 'from pack.own import run; run(False)'], check=True)\n"
    )
    measure = tool["measure"]
    places = {"ROOT": tmp_path, "SOURCE": tmp_path / "src", "TESTS": tmp_path / "tests"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in places.items():
            patch.setitem(measure.__globals__, name, value)
        patch.setenv("PYTHONPATH", str(tmp_path / "src"))
        found, code = measure("pack", ["-p", "no:cacheprovider"])
    assert code == 0
    shares = {path.name: one.shares for path, one in found.items()}
    assert shares["own.py"] == {"lines": 100.0, "branches": 100.0}
    assert shares["unused.py"]["lines"] == 0.0
