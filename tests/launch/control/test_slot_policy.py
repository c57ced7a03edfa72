"""Slots by node: who keeps one, who leaves, and how long a node that failed gets no new workers."""

from __future__ import annotations

import math

from torsh_distributed.launch.control.slot_policy import Blacklist, NodeSlots, SlotChoice, choose_members


def test_workers_leave_the_node_that_has_fewer_slots() -> None:
    node_of = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    chosen = choose_members({0: 1, 1: 2}, node_of, running=[0, 1, 2, 3], coming=[4], most=8)
    assert chosen == SlotChoice(target=3, unplaced=(1,), withdrawn=(4,))
    assert choose_members({0: 4, 1: 4}, node_of, running=[0, 2], coming=[], most=8) == SlotChoice(8, (), ())
    assert choose_members({0: 4, 1: 4}, node_of, running=[0, 2, 3], coming=[], most=2) == SlotChoice(2, (3,), ())
    assert choose_members({}, node_of, running=[0, 2], coming=[1], most=8) == SlotChoice(0, (0, 2), (1,))


def test_a_cooldown_doubles_up_to_its_most() -> None:
    failed: Blacklist[int] = Blacklist((10.0, 45.0))
    now_s = 100.0
    for least_s, most_s in ((10.0, 20.0), (20.0, 30.0), (40.0, 45.0), (45.0, 45.0)):
        delay_s = failed.add(1, now_s)
        assert least_s <= delay_s <= most_s
        assert math.isclose(failed.add(1, now_s + 1.0), delay_s - 1.0)  # another failure meanwhile changes nothing
        assert failed.next_end_s(now_s) == now_s + delay_s
        assert failed.has(1, now_s + delay_s / 2)
        assert not failed.has(1, now_s + delay_s)
        assert not failed.has(2, now_s)
        now_s += delay_s
    assert failed.next_end_s(now_s) is None


def test_a_node_that_failed_keeps_the_workers_it_has_and_gets_none() -> None:
    slots = NodeSlots({0: 4, 1: 2, 7: 9}, cooldown_s=None)
    assert slots.usable([0, 1], {0: 3, 1: 2}, 5.0) == {0: 4, 1: 2}
    assert slots.failed.add(0, 5.0) == math.inf
    assert slots.usable([0, 1], {0: 3}, 1e9) == {0: 3, 1: 2}
    slots.offered = {0: 2}
    assert slots.usable([0, 1], {0: 3}, 1e9) == {0: 2, 1: 0}
    assert slots.failed.next_end_s(5.0) is None
