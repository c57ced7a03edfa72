"""Faults as text: what parses back, what is refused, and what is random but repeatable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.elastic import Fault, FaultKind, random_faults
from torsh_distributed.elastic.faults.fault import faults_environment, parse_faults
from torsh_distributed.errors import InvalidArgument

DURATIONS = st.integers(0, 10**6).map(lambda thousandths: thousandths / 1000)
NEEDS_SECONDS = (FaultKind.DELAY, FaultKind.SLOW, FaultKind.LOCK_GIL)
MAY_LAST = (FaultKind.STOP, FaultKind.LINK_DOWN, FaultKind.SLOW_LINK, FaultKind.DISK_FULL)
ON_LINKS = (FaultKind.LINK_DOWN, FaultKind.SLOW_LINK)
LATE = (FaultKind.KILL, FaultKind.STOP, FaultKind.SEGFAULT, FaultKind.LOCK_GIL)


@st.composite
def any_fault(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(FaultKind))
    seconds = DURATIONS if kind in NEEDS_SECONDS else st.none() | DURATIONS if kind in MAY_LAST else st.none()
    targets = st.just("eth0") if kind in ON_LINKS else st.none()
    if kind is FaultKind.FLIP_BYTE:
        targets = st.none() | st.just("checkpoints/step-00000005/rank-0.safetensors")
    return Fault(
        kind=kind,
        rank=draw(st.integers(0, 99)),
        step=draw(st.integers(0, 9999)),
        point=draw(st.sampled_from(["", "all_reduce", "save"])),
        after_s=draw(st.none() | DURATIONS) if kind in LATE else None,
        attempt=draw(st.integers(0, 3)),
        target=draw(targets),
        rate_gbps=draw(DURATIONS) if kind is FaultKind.SLOW_LINK else None,
        seconds=draw(seconds),
    )


@given(st.lists(any_fault(), max_size=4))
def test_the_text_of_faults_parses_back(faults: list[Fault]) -> None:
    assert parse_faults("; ".join(map(str, faults))) == tuple(faults)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kill rank two at step 5", "not a fault: 'kill rank two at step 5'"),
        ("burn rank 2 at step 5", "not a fault"),
        ("delay rank 2 at step 5", "say for how long"),
        ("kill rank 2 at step 5 for 1 s", "a kill has no duration"),
        ("link_down rank 2 at step 5 for 1 s", "say on which interface"),
        ("slow_link rank 2 at step 5 on eth0", "a rate belongs to a slow_link"),
        ("kill rank 2 at step 5 on eth0", "a kill has no target"),
        ("raise rank 2 at step 5 in backward after 1 s", "can come after a point"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        faults_environment(text)


@given(st.integers(), st.integers(0, 12))
def test_random_faults_are_repeatable_and_in_bounds(seed: int, num_faults: int) -> None:
    kinds, points = list(FaultKind)[:8], ["", "forward"]
    faults = random_faults(seed, num_faults=num_faults, num_ranks=3, num_steps=4, kinds=kinds[:6], points=points)
    assert faults == random_faults(
        seed, num_faults=num_faults, num_ranks=3, num_steps=4, kinds=kinds[:6], points=points
    )
    assert len({(fault.rank, fault.step) for fault in faults}) == num_faults
    assert all(fault.rank < 3 and fault.step < 4 and fault.point in points for fault in faults)
