"""Who is in the world, decided by a state machine: losses, joins, scaling, in any order."""

from __future__ import annotations

import random

from torsh_distributed.launch.control.membership import CannotContinue, Membership, NewView, StartMembers
from torsh_distributed.launch.spec import DiscoverySpec, ElasticSpec


def trained(num_members: int = 4, **settings: object) -> Membership:
    """A membership whose workers all train."""
    membership = Membership(range(num_members), ElasticSpec(**settings))  # type: ignore[arg-type]
    for member in range(num_members):
        membership.ready(member)
    return membership


def enter(membership: Membership) -> list[object]:
    """All members enter the latest view; the decisions that follow."""
    return [one for member in list(membership.members) for one in membership.entered(member, membership.epoch)]


def test_the_rest_goes_on_at_once_and_the_lost_one_is_replaced() -> None:
    membership = trained()
    view, start = membership.lost([0])
    assert view == NewView(epoch=1, members=(1, 2, 3), is_urgent=True, lost=(0,))
    assert start == StartMembers((4,))
    assert enter(membership) == []
    assert membership.wants_in(4) == [NewView(epoch=2, members=(1, 2, 3, 4), is_urgent=False)]


def test_one_that_waits_is_let_in_only_when_the_others_have_regrouped() -> None:
    membership = trained()
    membership.lost([0])
    assert membership.wants_in(4) == []
    assert enter(membership) == [NewView(epoch=2, members=(1, 2, 3, 4), is_urgent=False)]


def test_a_second_loss_within_a_recovery_makes_another_view() -> None:
    membership = trained(on_loss="shrink")
    assert membership.lost([0]) == [NewView(epoch=1, members=(1, 2, 3), is_urgent=True, lost=(0,))]
    assert membership.lost([3]) == [NewView(epoch=2, members=(1, 2), is_urgent=True, lost=(3,))]
    assert membership.entered(1, 1) == []
    assert not membership.is_steady


def test_a_joiner_that_dies_while_it_enters_is_left_out_again() -> None:
    membership = trained(2, on_loss="replace")
    membership.lost([1])
    enter(membership)
    membership.wants_in(2)
    view, start = membership.lost([2])
    assert view == NewView(epoch=3, members=(0,), is_urgent=True, lost=(2,))
    assert start == StartMembers((3,))


def test_without_the_state_nobody_goes_on() -> None:
    membership = trained(2)
    membership.lost([1])
    enter(membership)
    membership.wants_in(2)  # let in, but it has not got the state yet
    assert membership.lost([0]) == [CannotContinue("no worker that holds the training state is left")]


def test_below_the_least_number_it_waits_or_gives_up() -> None:
    waiting = trained(3, min_workers=3)
    assert waiting.lost([1]) == [StartMembers((3,))]
    assert waiting.is_short
    assert waiting.wants_in(3) == [NewView(epoch=1, members=(0, 2, 3), is_urgent=True, lost=(1,))]
    shrinking = trained(3, min_workers=3, on_loss="shrink")
    assert shrinking.lost([1]) == [CannotContinue("2 of at least 3 workers are left")]


def test_replacements_that_never_join_are_not_started_for_ever() -> None:
    membership = trained(2, min_workers=2)
    (start,) = membership.lost([0])
    for _ in range(2):
        assert isinstance(start, StartMembers)
        (start,) = membership.lost(start.members)
    assert isinstance(start, StartMembers)
    assert membership.lost(start.members) == [CannotContinue("1 workers are left, and no other can be started")]


def test_everyone_dead_and_a_plan_that_cannot_are_for_a_restart() -> None:
    assert trained(2).lost([0, 1]) == [CannotContinue("no worker is left")]
    membership = trained(2)
    membership.ready(1, "the plan splits the model")
    assert membership.lost([0]) == [CannotContinue("the plan splits the model")]
    early = Membership(range(2), ElasticSpec())
    assert early.lost([0]) == [CannotContinue("worker 1 has not begun to train")]


def test_scaling_starts_workers_or_lets_the_last_ones_leave() -> None:
    membership = trained(2)
    assert membership.scale(3) == [StartMembers((2,))]
    assert membership.wants_in(2) == [NewView(epoch=1, members=(0, 1, 2), is_urgent=False)]
    assert membership.scale(1) == []  # once the others have entered
    (view,) = enter(membership)
    assert view == NewView(epoch=2, members=(0,), is_urgent=False, leaving=(1, 2))
    membership.finished(1)
    membership.finished(2)
    assert enter(membership) == []


def test_one_that_dies_before_it_has_left_makes_the_view_urgent() -> None:
    membership = trained(3)
    membership.scale(2)
    assert membership.lost([2]) == [NewView(epoch=2, members=(0, 1), is_urgent=True)]
    assert enter(membership) == []
    membership.scale(1)
    enter(membership)
    assert membership.lost([1]) == []  # the other has entered without it


def test_one_that_was_to_leave_is_told_again_if_another_is_lost_meanwhile() -> None:
    membership = trained(3, on_loss="shrink")
    membership.scale(2)
    assert membership.lost([0]) == [NewView(epoch=2, members=(1,), is_urgent=True, lost=(0,), leaving=(2,))]
    membership.finished(2)
    assert membership.stuck(2) == [NewView(epoch=3, members=(1,), is_urgent=True)]


def test_members_without_a_slot_leave_whatever_their_rank() -> None:
    membership = trained(4)
    assert membership.scale(2, unplaced=[0, 2]) == [NewView(epoch=1, members=(1, 3), is_urgent=False, leaving=(0, 2))]
    membership.finished(0)
    membership.finished(2)
    assert enter(membership) == []
    # One slot moves to another node: its worker is started before the one without a slot has left.
    assert membership.scale(2, unplaced=[1]) == [
        StartMembers((4,)),
        NewView(epoch=2, members=(3,), is_urgent=False, leaving=(1,)),
    ]


def test_too_few_slots_hold_the_world_until_there_are_enough() -> None:
    membership = trained(3, min_workers=2)
    held = NewView(epoch=1, members=(0,), is_urgent=False, leaving=(1, 2), is_held=True)
    assert membership.scale(1, unplaced=[1, 2]) == [held]
    assert membership.is_short
    membership.finished(1)
    membership.finished(2)
    assert membership.scale(0, unplaced=[0]) == []  # the last one keeps the state, and waits
    assert membership.scale(3, unplaced=[]) == [StartMembers((3, 4))]
    assert membership.wants_in(4) == [NewView(epoch=2, members=(0, 4), is_urgent=True)]
    assert not membership.is_short
    assert membership.wants_in(3) == []
    assert enter(membership) == [NewView(epoch=3, members=(0, 4, 3), is_urgent=False)]


def test_a_world_of_one_is_held_and_let_go_without_another_worker() -> None:
    membership = trained(1)
    assert membership.scale(0, unplaced=[0]) == [NewView(epoch=1, members=(0,), is_urgent=False, is_held=True)]
    assert membership.scale(1, unplaced=[]) == [NewView(epoch=2, members=(0,), is_urgent=True)]
    assert membership.scale(0, unplaced=[0]) == []  # once it has entered
    assert enter(membership) == [NewView(epoch=3, members=(0,), is_urgent=False, is_held=True)]


def test_all_slots_may_move_to_another_node() -> None:
    membership = trained(2)
    start, view = membership.scale(2, unplaced=[0, 1])
    assert start == StartMembers((2, 3))
    assert view == NewView(epoch=1, members=(0,), is_urgent=False, leaving=(1,))  # one of them keeps the state
    membership.finished(1)
    membership.wants_in(2)
    membership.wants_in(3)
    assert enter(membership) == [NewView(epoch=2, members=(0, 2, 3), is_urgent=False)]
    *_, view = enter(membership)
    assert view == NewView(epoch=3, members=(2, 3), is_urgent=False, leaving=(0,))


def test_a_loss_while_slots_are_short_waits_for_them() -> None:
    membership = trained(3, min_workers=2, discovery=DiscoverySpec(command=("x",)))
    membership.target = 1
    assert membership.lost([1, 2]) == []
    assert membership.is_short
    assert membership.scale(2, unplaced=[]) == [StartMembers((3,))]
    assert membership.lost([3]) == [StartMembers((4,))]
    membership.target = 1
    assert membership.lost([4]) == []  # no other can be started, but slots may come
    membership.scale(2, unplaced=[])
    assert membership.wants_in(5) == [NewView(epoch=1, members=(0, 5), is_urgent=True, lost=(1, 2))]


def test_who_comes_too_late_is_a_stray() -> None:
    membership = trained(1)
    membership.scale(2)
    assert membership.strays == []
    membership.finished(0)
    assert membership.strays == [1]


def test_any_order_of_events_keeps_the_rules() -> None:
    for seed in range(200):
        source = random.Random(seed)
        membership = trained(4, on_loss=source.choice(["replace", "shrink", "wait"]), max_workers=6)
        by_slots = source.random() < 0.5
        started: list[int] = []
        alive = set(membership.members)
        told: dict[int, NewView] = {}
        epoch = 0
        for _ in range(60):
            event = source.choice(["lost", "join", "enter", "scale", "stuck", "leave"])
            leaving = [member for member in alive if member in told and member in told[member].leaving]
            decisions: list[object] = []
            if event == "lost" and alive:
                victim = source.choice(sorted(alive))
                alive.discard(victim)
                started = [member for member in started if member != victim]
                decisions += membership.lost([victim])
            elif event == "leave" and leaving:
                alive.discard(leaving[0])
                membership.finished(leaving[0])
            elif event == "join" and started:
                decisions += membership.wants_in(started.pop())
            elif event == "enter" and membership.members:
                decisions += membership.entered(source.choice(membership.members), membership.epoch)
            elif event == "stuck":
                decisions += membership.stuck(membership.epoch)
            else:
                number = source.randint(1, 6)
                marked = [member for member in membership.running if source.random() < 0.3] if by_slots else None
                decisions += membership.scale(0 if by_slots and number == 6 else number, unplaced=marked)
            for decision in decisions:
                if isinstance(decision, NewView):
                    assert decision.epoch == epoch + 1
                    epoch = decision.epoch
                    assert len(set(decision.members)) == len(decision.members)
                    assert not set(decision.lost) & set(decision.members)
                    told |= dict.fromkeys(alive, decision)
                elif isinstance(decision, StartMembers):
                    started += decision.members
                    alive |= set(decision.members)
            if any(isinstance(decision, CannotContinue) for decision in decisions):
                break
            # Nobody is forgotten: who has heard of a world is in it, waits to be let in, or was told to leave.
            for member, view in told.items():
                if member in alive and view.epoch == membership.epoch and member < 4:
                    assert member in (*view.members, *view.leaving), (seed, member, view)
