"""Numbers stand for repeated requests; a number that was withdrawn is understood until every rank knows."""

from __future__ import annotations

import pytest

from torsh_distributed.migrate.horovod.negotiation.answers.request_table import NumberGiver, RequestNumbers
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request


def ask(name: str) -> Request:
    return Request(name, OpKind.ALLREDUCE, (("float32", (4,)),), "Sum")


def test_the_oldest_number_is_withdrawn_and_stays_understood_until_all_have_seen_it() -> None:
    giver = NumberGiver(2, num_ranks=2)
    first, _ = giver.give(ask("a"), 1)
    second, _ = giver.give(ask("b"), 1)
    assert first is not None
    assert second is not None
    giver.use([first])  # b is now the oldest
    third, withdrawn = giver.give(ask("c"), 5)
    assert withdrawn == [second]
    assert giver.number_of(ask("b")) is None
    assert giver.asked(second) == ask("b")
    giver.has_seen(0, 5)
    assert giver.asked(second) == ask("b")  # rank 1 may still send it
    giver.has_seen(1, 5)
    with pytest.raises(KeyError):
        giver.asked(second)
    assert giver.asked(third or 0) == ask("c")


def test_a_name_has_one_number_and_the_same_object_is_known_again() -> None:
    giver = NumberGiver(5, num_ranks=1)
    small, large = ask("a"), ask("a")._replace(tensors=(("float32", (8,)),))
    first, _ = giver.give(small, 1)
    assert giver.number_of(small) == giver.number_of(ask("a")) == first
    second, withdrawn = giver.give(large, 2)
    assert withdrawn == [first]
    assert giver.number_of(small) is None
    assert (giver.number_named("a"), giver.number_of(large)) == (second, second)
    assert list(giver.given) == [second]


def test_without_room_no_numbers_are_given() -> None:
    assert NumberGiver(0, num_ranks=2).give(ask("a"), 1) == (None, [])


def test_a_rank_forgets_what_is_withdrawn() -> None:
    numbers = RequestNumbers()
    numbers.learn(4, ask("a"))
    assert numbers.request_of(4) == ask("a")
    numbers.forget(4)
    assert numbers.number_of(ask("a")) is None
    numbers.forget(4)
