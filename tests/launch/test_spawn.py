from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torsh_distributed.errors import ProcessFailure, SerializationError
from torsh_distributed.launch.spawn import spawn

pytestmark = pytest.mark.ranks


def where(offset: int) -> tuple[int, str]:
    return int(os.environ["RANK"]) + offset, os.environ["WORLD_SIZE"]


def fail_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise ValueError("this is why")


def test_results_come_back_by_rank() -> None:
    assert spawn(where, 2, args=(10,)) == [(10, "2"), (11, "2")]


def test_a_failing_worker_is_an_error_and_its_traceback_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ProcessFailure, match="exit_code=1"):
        spawn(fail_on, 2, args=(1,))
    assert "ValueError: this is why" in capfd.readouterr().err


def test_what_does_not_pickle_is_refused_before_anything_starts() -> None:
    with pytest.raises(SerializationError, match="cannot be sent to a worker"):
        spawn(lambda: 1, 1)


def test_a_function_of_the_main_script_is_found(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            from torsh_distributed.launch.spawn import spawn

            def rank():
                return os.environ["RANK"]

            if __name__ == "__main__":
                print("results", spawn(rank, 2))
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert "results ['0', '1']" in done.stdout, done.stderr
