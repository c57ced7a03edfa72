"""TORSH_LOG: one variable for the launcher and the workers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torsh_distributed as td
from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.log_level import set_log_level


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """The library's logger, put back afterwards."""
    logger = logging.getLogger("torsh_distributed")
    level, handlers = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(level)
    logger.handlers[:] = handlers


def test_the_level_is_set_for_this_library_alone(ours: logging.Logger) -> None:
    root_level = logging.getLogger().level
    for _ in range(2):
        set_log_level({"TORSH_LOG": " debug "})
    assert ours.level == logging.DEBUG
    assert len(ours.handlers) == 1
    assert logging.getLogger().level == root_level


def test_without_the_variable_nothing_changes(ours: logging.Logger) -> None:
    before = ours.level, list(ours.handlers)
    set_log_level({})
    set_log_level({"TORSH_LOG": ""})
    assert (ours.level, list(ours.handlers)) == before


def test_a_program_with_its_own_logging_gets_every_message_once(
    ours: logging.Logger, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    set_log_level({"TORSH_LOG": "INFO"})
    ours.info("hello")  # pytest's handlers are those of a program
    assert [record.message for record in caplog.records] == ["hello"]
    assert capsys.readouterr().err == ""


def test_a_word_that_is_no_level_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="TORSH_LOG must be one of DEBUG, INFO") as caught:
        set_log_level({"TORSH_LOG": "loud"})
    assert "TORSH_LOG=loud" in str(caught.value)


def join_and_talk() -> None:
    td.init()
    logging.getLogger("torsh_distributed.comm").info("from rank %s", td.rank())
    logging.getLogger("somebody.else").info("not ours")
    td.destroy_process_group()


@pytest.mark.ranks
def test_workers_follow_it_from_init_on(world: World) -> None:
    for outcome in world.outcomes(join_and_talk, backend=None, env={"TORSH_LOG": "info"}):
        assert outcome.is_ok, outcome.trace
        assert f"INFO torsh_distributed.launch.worker.init: joined as rank {outcome.rank} of 2" in outcome.output
        assert f"INFO torsh_distributed.comm: from rank {outcome.rank}" in outcome.output
        assert "not ours" not in outcome.output
    for outcome in world.outcomes(join_and_talk, backend=None, env={"TORSH_LOG": "loud"}):
        assert isinstance(outcome.error, ConfigurationError)


@pytest.mark.ranks
def test_the_launcher_refuses_a_wrong_one_before_a_worker_starts(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text("print('started')\n")
    for module, command in (("torsh_distributed.run", []), ("torsh_distributed.cli.entry_point", ["run"])):
        done = subprocess.run(
            [sys.executable, "-m", module, *command, str(script)],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "TORSH_LOG": "chatty"},
        )
        assert done.returncode == 1
        assert "error ConfigurationError: TORSH_LOG must be one of DEBUG" in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
