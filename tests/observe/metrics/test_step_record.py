"""Steps arrive as they were packed; anything else is counted and kept out."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.observe.metrics.step_record import StepRecord, pack_steps, unpack_steps

seconds = st.floats(min_value=0, max_value=1e9, width=32)
maybe_seconds = st.none() | seconds
records = st.builds(
    StepRecord,
    step=st.integers(0, 2**50),
    time=seconds,
    step_s=seconds,
    forward_s=maybe_seconds,
    backward_s=maybe_seconds,
    optimizer_s=maybe_seconds,
    wait_s=maybe_seconds,
    bubble_s=maybe_seconds,
    data_s=maybe_seconds,
    other_s=seconds,
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    num_samples=st.none() | st.integers(0, 2**50),
    is_skipped=st.booleans(),
    preempted_s=maybe_seconds,
    grad_norm=maybe_seconds,
    learning_rate=maybe_seconds,
)


@given(st.lists(records, max_size=8), st.integers(1, 10))
def test_the_newest_steps_arrive_as_they_were(steps: list[StepRecord], most: int) -> None:
    found, num_bad = unpack_steps(pack_steps(steps), most=most)
    assert (found, num_bad) == (steps[-most:], 0)
    for step in found:
        kinds = {name: type(value) for name, value in step._asdict().items() if value is not None}
        assert kinds["step"] is int
        assert kinds["is_skipped"] is bool
        assert kinds.get("num_samples", int) is int


def packed(*numbers: float) -> str:
    return base64.b64encode(struct.pack("<2d8f2d4f", *numbers)).decode()


@pytest.mark.parametrize(
    ("text", "num_bad"),
    [
        (None, 0),
        ("", 0),
        (5, 1),
        ([[1, 2, 3]], 1),
        ("not base64 at all!", 1),
        ("ÄÖÜ", 1),
        (packed(*[1.0] * 16)[:40], 1),
        (packed(*[math.nan] * 16), 1),
        (packed(*[math.inf] * 16), 1),
        (packed(1.0, 1.0, 1.0, *[math.nan] * 6, 0.0, -math.inf, 1.0, 0.0, 0.0, 1.0, 1.0), 1),
    ],
)
def test_what_is_no_step_is_counted(text: Any, num_bad: int) -> None:
    assert unpack_steps(text, most=10) == ([], num_bad)


def test_a_torn_end_costs_one_step_alone() -> None:
    one = StepRecord(7, 1.0, 0.5, *[None] * 6, 0.5)
    found, num_bad = unpack_steps(base64.b64encode(base64.b64decode(pack_steps([one])) + b"\0" * 9).decode(), most=10)
    assert (found, num_bad) == ([one], 1)
