"""What instrumentation costs: an emit with and without subscribers, and the JSON-lines sink."""

from __future__ import annotations

import collections
import itertools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Budget, Case, Note, Row, Unit, compare
from torsh_distributed.events import JsonlSink, StepEvent, emit, subscribe, wanted

_BATCH = 2_000


def _logger(handler: logging.Handler, level: int) -> logging.Logger:
    logger = logging.Logger("benchmark", level)
    logger.addHandler(handler)
    return logger


def _each(function: Callable[[Any], object], argument: object) -> Callable[[], None]:
    """Call the function `_BATCH` times from C: a Python loop would cost as much as the function."""

    def batch() -> None:
        collections.deque(map(function, itertools.repeat(argument, _BATCH)), maxlen=0)

    return batch


def _rows(budget: Budget) -> Iterator[Row | Note]:
    event = StepEvent(step=1, loss=2.5, duration_s=0.05, comm_s=0.01)
    silent = _logger(logging.NullHandler(), logging.WARNING)
    heard = _logger(logging.NullHandler(), logging.DEBUG)

    def build_and_emit(step: int) -> None:
        emit(StepEvent(step=step, loss=2.5, duration_s=0.05, comm_s=0.01))

    def log_numbers(step: int) -> None:
        heard.debug("step %d loss %f duration %f comm %f", step, 2.5, 0.05, 0.01)

    yield compare(
        "emit, nobody listens",
        _each(emit, event),
        {"logging": _each(silent.debug, "a step")},
        budget=budget,
        amount=_BATCH,
    )
    yield compare(
        "ask whether anyone listens",
        _each(wanted, StepEvent),
        {"logging": _each(silent.isEnabledFor, logging.DEBUG)},
        budget=budget,
        amount=_BATCH,
    )
    unsubscribe = subscribe(lambda _: None, StepEvent)
    try:
        # No rival: logging cannot emit a prebuilt record.
        yield compare("emit, one listener", _each(emit, event), {}, budget=budget, amount=_BATCH)
        yield compare(
            "build and emit, one listener",
            _each(build_and_emit, 1),
            {"logging": _each(log_numbers, 1)},
            budget=budget,
            amount=_BATCH,
        )
    finally:
        unsubscribe()
    yield from _sink_rows(budget)


def _sink_rows(budget: Budget) -> Iterator[Row]:
    """Events written to a file as JSON, from the emit to the last byte handed to the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        handler = logging.FileHandler(Path(folder) / "log.jsonl")
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger = _logger(handler, logging.DEBUG)

        def log_batch() -> None:
            for step in range(_BATCH):
                record = {"time": time.time(), "rank": 0, "type": "step", "step": step, "loss": 2.5}
                logger.debug(json.dumps({**record, "duration_s": 0.05, "comm_s": 0.01}))

        with JsonlSink(folder) as sink:

            def emit_batch() -> None:
                for step in range(_BATCH):
                    emit(StepEvent(step=step, loss=2.5, duration_s=0.05, comm_s=0.01))
                sink.flush()

            # Measured separately from the rival, which does not use the bus: only the sink is subscribed.
            yield compare(
                "events to JSON lines in a file",
                emit_batch,
                {"logging": log_batch},
                budget=budget,
                amount=_BATCH,
                unit=Unit.PER_SECOND,
            )
        handler.close()


CASE = Case(
    title="Events: what instrumentation costs",
    about="""One emit of a step event in the calling thread, and events written to a file as JSON lines. The rival is
    Python's logging: switched off by level, with a handler that does nothing, and with a file handler that writes the
    same fields as JSON.""",
    rows=_rows,
)
