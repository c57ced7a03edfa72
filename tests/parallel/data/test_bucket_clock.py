"""How much of sending gradients was hidden behind backward."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.data.bucket_clock import BucketClock, auto_bucket, bucket_size_mb
from torsh_distributed.plan import DdpConfig


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


@pytest.mark.parametrize(
    ("latency_s", "gbps", "expected_mb"),
    [(1e-4, 1.0, 1.0), (1e-3, 10.0, 11.9), (4e-5, 100.0, 4.8), (1e-2, 100.0, 50.0)],
)
def test_bytes_take_ten_times_the_latency_within_limits(latency_s: float, gbps: float, expected_mb: float) -> None:
    assert bucket_size_mb(latency_s=latency_s, byte_s=8e-9 / gbps) == pytest.approx(expected_mb, rel=0.02)


@given(st.floats(1e-7, 1e-1), st.floats(1e-13, 1e-6))
def test_a_slower_start_never_asks_for_smaller_buckets(latency_s: float, byte_s: float) -> None:
    sizes = [bucket_size_mb(latency_s=latency_s * factor, byte_s=byte_s) for factor in (1, 2)]
    assert 1.0 <= sizes[0] <= sizes[1] <= 50.0


def test_networks_are_known_by_their_usual_names() -> None:
    assert DdpConfig.for_network("InfiniBand").max_bucket_size_mb == 50.0
    assert DdpConfig.for_network("10GbE", overlap=False) == DdpConfig(
        max_bucket_size_mb=25.0, min_bucket_size_mb=1.0, overlap=False
    )
    assert DdpConfig.for_network("WiFi 5").min_bucket_size_mb == 0.5
    with pytest.raises(InvalidArgument, match="did you mean 100gbe"):
        DdpConfig.for_network("100gb")


def measured_on_another_device() -> None:
    group = dist.group.WORLD
    assert group is not None
    # Nothing can be read back from this device: the figures were to come from there.
    with pytest.raises(NotImplementedError, match="meta tensor"):
        auto_bucket(group=group, device=torch.device("meta"))


def test_the_link_is_measured_with_tensors_of_the_models_device(world: World) -> None:
    world.run(measured_on_another_device, backend="gloo")
