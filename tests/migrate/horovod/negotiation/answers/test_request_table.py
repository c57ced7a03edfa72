"""Operations become ready when all ranks have asked for them, in whatever order, and differences are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.migrate.horovod.negotiation.answers.request_table import NumberGiver, ReadyOp, RequestTable
from torsh_distributed.migrate.horovod.negotiation.request import OpKind, Request


def ask(name: str, **fields: object) -> Request:
    return Request(name, **{"kind": OpKind.ALLREDUCE, "tensors": (("float32", (2, 3)),), "op": "Sum", **fields})


@given(st.data(), st.integers(2, 4), st.integers(1, 12))
def test_every_order_of_every_rank_makes_each_operation_ready_once(
    data: st.DataObject, num_ranks: int, num_ops: int
) -> None:
    orders = [data.draw(st.permutations(range(num_ops))) for _ in range(num_ranks)]
    turns = data.draw(st.permutations([rank for rank in range(num_ranks) for _ in range(num_ops)]))
    table, places, ready = RequestTable(num_ranks), [0] * num_ranks, []
    for rank in turns:
        table.add(rank, ask(f"op{orders[rank][places[rank]]}"))
        places[rank] += 1
        ready += table.take_ready()
    assert sorted(one.request.name for one in ready) == sorted(f"op{index}" for index in range(num_ops))
    assert not any(one.error for one in ready)
    assert not table.is_waiting


@given(st.data(), st.integers(1, 3))
def test_numbers_give_what_requests_give(data: st.DataObject, num_ranks: int) -> None:
    """Random messages: other orders, mismatches, joins, gathered rows, and numbers withdrawn meanwhile."""
    giver = NumberGiver(3, num_ranks)
    single, together = RequestTable(num_ranks), RequestTable(num_ranks, giver)
    open_names: list[set[str]] = [set() for _ in range(num_ranks)]
    joined: set[int] = set()
    for turn in range(1, data.draw(st.integers(2, 12))):
        rank = data.draw(st.integers(0, num_ranks - 1))
        if rank in joined:
            continue
        names = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
        fields = data.draw(st.sampled_from([{}, {}, {}, {"op": "Max"}, {"kind": OpKind.ALLGATHER}]))
        message = [ask(name, **fields) for name in names if name not in open_names[rank]]
        open_names[rank] |= set(names)
        if data.draw(st.integers(0, 9)) == 0:
            message = [Request("join", OpKind.JOIN)]
            joined.add(rank)
        for request in message:
            single.add(rank, request)
        numbers = [giver.number_of(request) for request in message]
        together.add_all(
            rank, [number if number is not None else one for one, number in zip(message, numbers, strict=True)]
        )
        wanted = {one.request.name: one for one in single.take_ready()}
        repeated = [ReadyOp(giver.request_of(number)) for number in together.take_numbers()]
        found = {one.request.name: one for one in (*repeated, *together.take_ready())}
        assert found.keys() == wanted.keys()
        for name, one in found.items():
            assert bool(one.error) == bool(wanted[name].error)
            assert (one.sizes, one.joined) == (wanted[name].sizes, wanted[name].joined)
            if not one.error and not one.joined and one.request.kind == OpKind.ALLREDUCE:
                assert one.request == wanted[name].request
                if giver.number_of(one.request) is None:
                    together.withdraw(giver.give(one.request, turn)[1])
        if "join" in found:
            joined.clear()
        open_names = [names - wanted.keys() for names in open_names]
        assert single.is_waiting == together.is_waiting
    waiting = [sorted(stall.name for stall in table.stalled(0.0)) for table in (single, together)]
    assert waiting[0] == waiting[1]


def test_numbers_that_wait_are_reported_and_compared_with_requests_of_their_name() -> None:
    now = [0.0]
    giver = NumberGiver(10, 2)
    table = RequestTable(2, giver, clock=lambda: now[0])
    numbers = [giver.give(ask(name), 1)[0] or 0 for name in "ab"]
    table.add_all(0, numbers)
    assert table.is_waiting
    now[0] = 5.0
    assert table.stalled(10.0) == []
    table.add_all(1, numbers)
    assert table.take_numbers() == tuple(numbers)
    assert not table.is_waiting
    table.add_all(1, [numbers[0], ask("b", op="Max")])
    now[0] = 20.0
    assert [(one.name, one.waited_s, one.missing) for one in table.stalled(10.0)] == [
        ("b", 15.0, (0,)),
        ("a", 15.0, (0,)),
    ]
    table.add_all(0, numbers)
    good, bad = table.take_ready()
    assert not good.error
    assert "mismatched reductions" in bad.error
    table.add_all(0, [numbers[0]])
    table.add(1, ask("a", op="Max"))
    assert "mismatched reductions" in table.take_ready()[0].error


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"tensors": (("float32", (3, 2)),)}, "mismatched shapes"),
        ({"tensors": (("float64", (2, 3)),)}, "mismatched data types"),
        ({"tensors": (("float32", (2, 3)),) * 2}, "mismatched numbers of tensors"),
        ({"op": "Max"}, "mismatched reductions"),
        ({"prescale": 2.0}, "mismatched prescale factors"),
        ({"postscale": 2.0}, "mismatched postscale factors"),
        ({"device": "cuda"}, "mismatched devices"),
        ({"root": 1}, "mismatched root ranks"),
        ({"splits": (7,)}, "mismatched parameters"),
        ({"kind": OpKind.BROADCAST}, "mismatched operations"),
    ],
)
def test_a_difference_is_an_answer_that_names_both_sides(theirs: dict[str, object], words: str) -> None:
    table = RequestTable(2)
    table.add(0, ask("a"))
    table.add(1, ask("a", **theirs))
    (one,) = table.take_ready()
    assert words in one.error
    assert "rank 0 has" in one.error
    assert "rank 1 has" in one.error


def test_rows_may_differ_where_they_are_gathered_and_other_dims_may_not() -> None:
    table = RequestTable(2)
    table.add(1, ask("g", kind=OpKind.ALLGATHER, tensors=(("float32", (5, 3)),)))
    table.add(0, ask("g", kind=OpKind.ALLGATHER, tensors=(("float32", (2, 3)),)))
    table.add(0, ask("h", kind=OpKind.ALLGATHER, tensors=(("float32", (2, 3)),)))
    table.add(1, ask("h", kind=OpKind.ALLGATHER, tensors=(("float32", (2, 4)),)))
    good, bad = table.take_ready()
    assert good.sizes == ((2,), (5,))
    assert not good.error
    assert "beyond the first dim" in bad.error


def test_a_joined_rank_is_not_waited_for_and_the_last_one_ends_the_join() -> None:
    table = RequestTable(3)
    table.add(0, ask("before"))
    table.add(0, Request("join", OpKind.JOIN))
    table.add(1, ask("before"))
    assert table.take_ready() == []  # rank 2 has not asked, and rank 0 counts once
    table.add(2, ask("before"))
    assert table.take_ready()[0].joined == ()
    table.add(1, ask("after"))
    table.add(2, ask("after"))
    table.add(1, ask("gather", kind=OpKind.ALLGATHER))
    table.add(2, ask("gather", kind=OpKind.ALLGATHER))
    reduced, gathered = table.take_ready()
    assert reduced.joined == (0,)
    assert "rank 0 has joined" in gathered.error
    table.add(2, Request("join", OpKind.JOIN))
    table.add(1, ask("late"))
    assert table.take_ready()[0].joined == (0, 2)
    table.add(1, Request("join", OpKind.JOIN))
    assert table.take_ready()[0].sizes == ((1,),)
    assert not table.is_waiting


def test_who_waits_for_whom_is_reported_once_per_interval() -> None:
    now = [0.0]
    table = RequestTable(3, clock=lambda: now[0])
    table.add(1, ask("late"))
    now[0] = 59.0
    assert table.stalled(60.0) == []
    now[0] = 61.0
    (stall,) = table.stalled(60.0)
    assert (stall.name, stall.missing, stall.waited_s) == ("late", (0, 2), 61.0)
    assert table.stalled(60.0) == []
    assert table.longest_wait_s() == 61.0
