"""Leases, with the clock passed in."""

from __future__ import annotations

from torsh_distributed.rpc.references.leases import LeaseTable


def test_a_reference_lives_while_one_holder_renews() -> None:
    table = LeaseTable(10)
    table.hold("r", "a", 0)
    table.hold("r", "b", 0)
    assert table.renew(["r"], "b", 8) == []
    assert table.expired(12) == []  # a is gone, b is not
    assert table.expired(17.9) == []
    assert table.expired(18) == ["r"]
    assert len(table) == 0


def test_the_last_release_frees_it_and_a_stranger_frees_nothing() -> None:
    table = LeaseTable(10)
    table.hold("r", "a", 0)
    table.renew(["r"], "b", 1)  # a taker registers by renewing
    assert not table.release("r", "c")
    assert not table.release("r", "a")
    assert table.release("r", "b")
    assert not table.release("r", "b")


def test_renewing_what_is_gone_says_so_and_holds_nothing() -> None:
    table = LeaseTable(10)
    assert table.renew(["gone"], "a", 0) == ["gone"]
    assert len(table) == 0
