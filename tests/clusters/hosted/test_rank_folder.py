"""The folder of a rank that is killed goes with the next start; that of one that lives, or of others, stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_HOLD = """
import sys
from torsh_distributed.clusters.hosted.rank_folder import rank_folder
with rank_folder() as folder:
    (folder / "secret").write_text("hush")
    print(folder, flush=True)
    sys.stdin.read()
"""


def hold(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a rank's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_rank_left_goes_with_the_next_start_and_nothing_else(tmp_path: Path) -> None:
    temporary, outside = tmp_path / "tmp", tmp_path / "outside"
    temporary.mkdir()
    outside.mkdir()
    (outside / "in-use").touch()
    (temporary / "torsh-rank-link").symlink_to(outside)
    (temporary / "torsh-rank-without-a-lock").mkdir()
    killed, left = hold(temporary)
    living, used = hold(temporary)
    killed.kill()
    killed.communicate()
    assert (left / "secret").exists()
    last, _ = hold(temporary)
    try:
        assert not left.exists()
        assert (used / "secret").exists()
        assert (outside / "in-use").exists()
        assert (temporary / "torsh-rank-without-a-lock").exists()
    finally:
        for process in (living, last):
            process.communicate("")
    assert not used.exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    private = tmp_path / "private.txt"
    private.write_text("mine")
    (tmp_path / "torsh-rank-forged").mkdir()
    (tmp_path / "torsh-rank-forged" / "in-use").symlink_to(private)
    process, _ = hold(tmp_path)
    process.communicate("")
    assert process.returncode == 0
    assert private.read_text() == "mine"
    assert (tmp_path / "torsh-rank-forged").exists()
    shutil.rmtree(tmp_path / "torsh-rank-forged")
