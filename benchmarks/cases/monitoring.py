"""A load test: a thousand ranks report to the process that observes a job; and what recording a value takes."""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator

from benchmarks.cases.observe_page import address_of
from benchmarks.harness import Budget, Case, Measurement, Note, Row, Unit
from benchmarks.process_usage import cpu_s, peak_bytes
from tests.observe.packets import FakeRank
from torsh_distributed.cli.bench.rivals.monitor import value_rows
from torsh_distributed.observe.serving.observer_process import ObserverProcess
from torsh_distributed.observe.settings import ObserveSettings

_PERIOD_S = 2.0
"""Ranks report every other second."""
_LOOK_S = 0.05
_LIMIT_S = 60.0
_STEPS = 3


class _Reporters:
    """All ranks of a job, one after the other, so that each reports once in a period; until `close`."""

    def __init__(self, process: ObserverProcess, num_ranks: int) -> None:
        self._process = process
        self._ranks = [FakeRank(number) for number in range(num_ranks)]
        self._source = random.Random(0)
        self._closing = threading.Event()
        self._asked = threading.Event()
        self._sent: tuple[int, int, float] | None = None
        self.num_rounds = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def next_report(self) -> tuple[int, int, float]:
        """(rank, step, when) of the next report that is sent."""
        self._sent = None
        self._asked.set()
        while self._sent is None:
            if not self._thread.is_alive():
                raise RuntimeError("nobody reports any more")
            self._closing.wait(0.001)
        return self._sent

    def _run(self) -> None:
        start_s, count = time.monotonic(), 0
        while True:
            for number, rank in enumerate(self._ranks):
                for _ in range(_STEPS):
                    compute_s = self._source.uniform(0.015, 0.025)
                    rank.step(compute_s=compute_s, wait_s=0.03 - compute_s)
                packet = rank.packet()
                packet["facts"]["world_size"] = len(self._ranks)
                count += 1
                late_s = start_s + count * _PERIOD_S / len(self._ranks) - time.monotonic()
                if self._closing.wait(max(0.0, late_s)):
                    return
                if not self._process.send(packet):
                    raise RuntimeError("the observer did not take a report")
                if self._asked.is_set():
                    self._asked.clear()
                    self._sent = number, (self.num_rounds + 1) * _STEPS, time.monotonic()
            self.num_rounds += 1

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_LIMIT_S)


def _load(budget: Budget) -> Iterator[Row | Note]:
    source = random.Random(1)
    num_ranks, num_looks, num_warm = (50, 3, 2) if budget.is_quick else (1000, 60, 15)
    process = ObserverProcess(ObserveSettings(page_port=0))
    try:
        url = address_of(process)
        job = {"type": "job", "run_id": "many", "command": "train.py", "world_size": num_ranks, "num_nodes": 1}
        process.send(job)
        ranks = _Reporters(process, num_ranks)
        try:
            while ranks.num_rounds < num_warm:  # rings are full, and nothing is new any more
                time.sleep(_LOOK_S)
            before_s, began_s = cpu_s(process.pid), time.monotonic()
            lags_s = []
            for _ in range(num_looks):
                time.sleep(source.random())  # the page's state is made once a second: look at any moment of it
                lags_s.append(_lag_s(url, *ranks.next_report()))
            share = (cpu_s(process.pid) - before_s) / (time.monotonic() - began_s)
            memory = peak_bytes(process.pid)
            if process.num_dropped:
                raise RuntimeError(f"{process.num_dropped} reports were dropped")
        finally:
            ranks.close()
    finally:
        process.close()
    name = f"{num_ranks:,} ranks"
    yield Row(name=f"{name}: a report is on the page", unit=Unit.SECONDS, ours=Measurement.of(lags_s))
    yield Row(name=f"{name}: memory of the observer", unit=Unit.BYTES, ours=Measurement.of([memory]))
    yield Row(name=f"{name}: its processor time in a second", unit=Unit.SECONDS, ours=Measurement.of([share]))
    yield Note(
        text=f"{name} report every other second: what one says is in the page's state after "
        f"{statistics.median(lags_s):.2f} s (median), {max(lags_s):.2f} s at most of {num_looks}; that state is made "
        f"once a second. No report was dropped; the observer took {memory / 2**20:.0f} MiB at most and {share:.0%} of "
        "a core while somebody looked."
    )


def _lag_s(url: str, rank: int, step: int, sent_s: float) -> float:
    """From a report to the first state that has it."""
    while True:
        with urllib.request.urlopen(f"{url}state.json", timeout=_LIMIT_S) as answer:
            state = json.load(answer)
        shown = next((one["step"] for one in state["ranks"] if one["rank"] == rank), None)
        if shown is not None and shown >= step:
            return time.monotonic() - sent_s
        if time.monotonic() - sent_s > _LIMIT_S:
            raise RuntimeError(f"rank {rank} reported step {step}, and the page is at {shown}")
        time.sleep(_LOOK_S)


def _rows(budget: Budget) -> Iterator[Row | Note]:
    yield from value_rows(budget)
    yield from _load(budget)


CASE = Case(
    title="Monitoring: a value, and a thousand ranks",
    about="""Recording a value, beside the histogram of prometheus-client: the mean of many calls, and the 99th
    percentile of single ones, with the reading of the clock in it. Then a load test: reports of a thousand ranks, as
    real ranks make them, over the socket of the process that observes a job, and a viewer who asks for the page's state
    again and again until it has what a rank has just said. The ranks are played by one process.""",
    rows=_rows,
)
