"""How much of sending gradients was hidden behind backward."""

from __future__ import annotations

import time

import pytest

from torsh_distributed.parallel.data.bucket_clock import BucketClock


def test_what_travels_before_the_last_gradient_is_ready_is_hidden() -> None:
    clock = BucketClock()
    began = time.monotonic()
    clock.add(0, 8, began - 3.0, codec=None, wire_bytes=None)  # back before the last gradient is ready
    clock.note_ready()
    clock.add(1, 8, began - 1.0, codec=None, wire_bytes=None)  # left before, back after
    clock.end_step()
    figures = clock.overlap()
    assert figures.num_steps == 1
    assert figures.comm_s == pytest.approx(3.0, abs=0.5)
    assert figures.hidden_s <= figures.comm_s
    assert figures.exposed_s == pytest.approx(0.0, abs=0.5)
    assert figures.hidden_share == pytest.approx(1.0, abs=0.2)
    assert clock.take_s() == figures.comm_s
    assert clock.take_s() == 0.0


def test_without_gradients_on_their_way_there_is_no_share_to_tell() -> None:
    clock = BucketClock()
    clock.end_step()
    assert clock.overlap().num_steps == 0
    assert clock.overlap().hidden_share is None
