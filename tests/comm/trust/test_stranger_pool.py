"""Strangers have few places, and members always get one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.comm.trust.stranger_pool import StrangerPool


def test_the_address_with_the_most_connections_gives_way() -> None:
    pool: StrangerPool[int] = StrangerPool(limit=4)
    assert [pool.admit(number, "attacker") for number in range(4)] == [None] * 4
    assert pool.admit(10, "member") == 0
    pool.refuse(0, "too many")
    assert pool.admit(4, "attacker") == 1
    assert 10 in pool


@given(flood=st.integers(1, 200))
def test_a_member_is_never_evicted_by_another_address(flood: int) -> None:
    pool: StrangerPool[int] = StrangerPool(limit=8)
    pool.admit(-1, "member")
    for number in range(flood):
        evicted = pool.admit(number, "attacker")
        if evicted is not None:
            assert evicted != -1
            pool.refuse(evicted, "too many")
    assert len(pool) <= 8
    pool.release(-1)


def test_hundreds_of_strangers_are_one_line() -> None:
    pool: StrangerPool[int] = StrangerPool(limit=1000)
    for number in range(640):
        pool.admit(number, f"10.0.0.{number % 5}")
        pool.refuse(number, "no proof" if number % 2 else "another protocol")
    assert pool.summary_due_s(100.0) == 100.5
    line = pool.summary(100.5)
    assert line == (
        "640 connections from 10.0.0.0, 10.0.0.1, 10.0.0.2 and 2 more were refused: "
        "320 × another protocol; 320 × no proof"
    )
    assert pool.summary_due_s(101.0) is None
    pool.admit(1, "a")
    pool.refuse(1, "no proof")
    assert pool.summary_due_s(102.0) == 160.5
    assert pool.summary(160.5) == "a connection from a was refused: no proof"
