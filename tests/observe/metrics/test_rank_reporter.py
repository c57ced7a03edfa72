from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from torsh_distributed import events
from torsh_distributed.observe.metrics.rank_collector import MAX_STEPS_A_SUMMARY, RankCollector
from torsh_distributed.observe.metrics.rank_metrics import RankMetrics
from torsh_distributed.observe.metrics.rank_reporter import MAX_PACKET_BYTES, RankReporter
from torsh_distributed.observe.metrics.step_record import unpack_steps


def test_summaries_come_by_themselves_and_a_last_one_at_the_end() -> None:
    packets: list[dict[str, Any]] = []
    two = threading.Event()

    def send(packet: dict[str, Any]) -> bool:
        packets.append(packet)
        if len(packets) == 2:
            two.set()
        return True

    reporter = RankReporter(RankCollector(), send, interval_s=0.01)
    try:
        events.emit(events.StepEvent(step=1, loss=0.5, duration_s=0.1))
        assert two.wait(20)
        reporter.facts["mesh"] = {"dp": 2}
        events.emit(events.StepEvent(step=2, loss=0.4, duration_s=0.1))
    finally:
        reporter.close()
    told = [step.step for packet in packets for step in unpack_steps(packet["steps"], most=10)[0]]
    assert told == [1, 2], "each step travels once"
    assert packets[-1]["facts"]["mesh"] == {"dp": 2}
    names = {name for name, _, _ in packets[-1]["metrics"]}
    assert {"torsh_host_memory_bytes", "torsh_process_cpu_cores", "torsh_node_memory_total_bytes"} <= names


def test_a_packet_never_exceeds_the_line() -> None:
    collector = RankCollector(RankMetrics())
    for number in range(1000):
        collector.take(events.StepEvent(step=number, loss=1 / 3, duration_s=0.1), now_s=0.1 * number)
    for number in range(200):
        collector.metrics.custom(f"metric_{number}_{'x' * 80}", kind="distribution", help="h" * 300).record(1 / 3)
    packets: list[dict[str, Any]] = []
    reporter = RankReporter(collector, lambda packet: packets.append(packet) is None, interval_s=60)
    reporter.close()
    assert len(json.dumps(packets[-1])) <= MAX_PACKET_BYTES
    assert packets[-1]["metrics"]
    assert len(unpack_steps(packets[-1]["steps"], most=1000)[0]) == MAX_STEPS_A_SUMMARY


@pytest.mark.parametrize(("node", "seconds"), [("0", [1002, 1004]), ("1", [1001, 1003]), ("6", [1002, 1004])])
def test_ranks_of_a_node_tell_their_metrics_in_the_same_second(
    node: str, seconds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_RANK", node)
    packets: list[dict[str, Any]] = []
    reporter = RankReporter(RankCollector(), lambda packet: packets.append(packet) is None, interval_s=1.0)
    reporter._closing.set()  # the thread, which has a clock of its own
    reporter._thread.join(timeout=5)
    reporter._closing.clear()
    del packets[:]
    reporter._sequence = 2  # the first two have them anyway
    for moment in (1001.01, 1002.01, 1003.01, 1004.01):
        clock = SimpleNamespace(time=lambda moment=moment: moment, monotonic=lambda moment=moment: moment - 900)
        monkeypatch.setattr("torsh_distributed.observe.metrics.rank_reporter.time", clock)
        reporter.report()
        assert reporter._until_next_s() == pytest.approx(0.99), "the next whole second, whenever the rank began"
    assert [int(packet["time"]) for packet in packets if "metrics" in packet] == seconds
    assert len(packets) == 4
    reporter.close()


def test_a_sender_that_raises_does_not_reach_training() -> None:
    def send(packet: dict[str, Any]) -> bool:
        raise RuntimeError("the line is broken")

    reporter = RankReporter(RankCollector(), send, interval_s=60)
    reporter.report()
    reporter.close()
