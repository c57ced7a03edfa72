"""The programs of the guides that start a cluster run as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.engine_marks import DASK, RAY
from tests.docs.blocks import ROOT, blocks_of

pytestmark = [pytest.mark.ranks, pytest.mark.matrix, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("page", "program"),
    [
        pytest.param("on-ray.md", "on_ray.py", marks=RAY),
        pytest.param("on-dask.md", "on_dask.py", marks=DASK),
    ],
)
def test_the_program_of_a_guide_runs(page: str, program: str, tmp_path: Path) -> None:
    (block,) = (one for one in blocks_of(ROOT / "docs" / "guides" / page) if one.title == program)
    (tmp_path / program).write_text(block.source)
    (tmp_path / "token").write_text("a-token-of-the-tests-0123456789abcdef")
    (tmp_path / "token").chmod(0o600)
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={**os.environ, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks end at" in done.stdout
