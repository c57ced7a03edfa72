"""Which tests a run takes: one shard of a long table, and not again what another run has already passed.

`make matrix` runs all of the matrix, `.ci/run` one shard of it. A run with everything installed may leave out
what one on a bare machine has passed (`--passed` there, `--leave-out` here); what was skipped there runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gates")
    group.addoption("--shard", metavar="K/N", type=parse_shard, help="run the K-th of N parts")
    group.addoption("--passed", metavar="FILE", type=Path, help="write the ids of the tests that pass to FILE")
    group.addoption("--leave-out", metavar="FILE", type=Path, help="leave out the tests whose ids are in FILE")


def parse_shard(text: str) -> tuple[int, int]:
    """ "2/8" as (2, 8)."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(text)
    return int(number), int(count)


def shard_of(ids: Iterable[str], number: int, count: int) -> list[str]:
    """The ids of one shard: every `count`-th of all in order.

    Cases of one function take about equally long and stand side by side, so that shards take about equally long too.
    """
    return sorted(ids)[number - 1 :: count]


def pytest_configure(config: pytest.Config) -> None:
    """Note what passes, in the one process that hears of every test."""
    if config.getoption("--passed") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Passed(config.getoption("--passed")))


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is in another shard or was passed by another run."""
    wanted = {item.nodeid for item in items}
    if (shard := config.getoption("--shard")) is not None:
        wanted &= set(shard_of(wanted, *shard))
    if (file := config.getoption("--leave-out")) is not None:
        wanted -= set(file.read_text().splitlines())
    if left_out := [item for item in items if item.nodeid not in wanted]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid in wanted]


class _Passed:
    """Collects the ids of tests that pass in all their phases."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call" and not hasattr(report, "wasxfail"):
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("".join(f"{name}\n" for name in sorted(self._passed - self._failed)))
