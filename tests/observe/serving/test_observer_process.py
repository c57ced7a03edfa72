"""The launcher's handle on its observer: messages that come all at once, and an observer that does not take them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.observe.packets import FakeRank
from torsh_distributed.observe.serving import observer_process
from torsh_distributed.observe.serving.observer_process import ObserverProcess
from torsh_distributed.observe.settings import ObserveSettings

NUM_RANKS = 400


def test_summaries_of_hundreds_of_ranks_at_one_moment_all_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket holds a few of them, and the observer is not running when they come."""
    monkeypatch.setattr(observer_process, "_SEND_BUFFER_BYTES", 1 << 14)
    process = ObserverProcess(ObserveSettings(exports=(f"jsonl:{tmp_path / 'metrics.jsonl'}",)))
    try:
        os.kill(process.pid, signal.SIGSTOP)
        for number in range(NUM_RANKS):
            rank = FakeRank(number)
            rank.step()
            packet = rank.packet()
            packet["facts"]["world_size"] = NUM_RANKS
            assert process.send(packet)
        assert process.num_dropped == 0
        os.kill(process.pid, signal.SIGCONT)
        process.finish(lambda *_: None)
    finally:
        process.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seen = {line["labels"]["rank"] for line in lines if "rank" in line.get("labels", {})}
    assert len(seen) == NUM_RANKS


def test_what_is_more_than_the_bound_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_process, "_MAX_WAITING_BYTES", 1 << 20)
    monkeypatch.setattr(observer_process, "_SEND_BUFFER_BYTES", 1 << 14)
    process = ObserverProcess(ObserveSettings())
    try:
        os.kill(process.pid, signal.SIGSTOP)
        taken = sum(process.send({"type": "metrics", "pad": "x" * 10_000}) for _ in range(300))
        assert 100 <= taken <= 110
        assert process.num_dropped == 300 - taken
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.close()


def test_a_message_to_an_observer_that_has_ended_is_not_taken() -> None:
    process = ObserverProcess(ObserveSettings())
    try:
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not process.send({"type": "metrics"})
        assert process.num_dropped == 1
    finally:
        process.close()
