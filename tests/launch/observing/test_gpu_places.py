"""Every worker gets a sound GPU of its own, those that run keep theirs, and too few are noticed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from torsh_distributed.launch.observing.gpu_places import GpuPlaces

GPUS = ("a", "b", "c", "d")


def test_nothing_changes_while_all_are_sound() -> None:
    places = GpuPlaces(GPUS, 4)
    assert places.make_room(range(4), ())
    assert places.visible(range(4)) is None


def test_a_spare_gpu_takes_the_place_of_the_one_that_is_left_out() -> None:
    places = GpuPlaces(GPUS, 3)
    places.excluded.add("b")
    assert places.make_room(range(3), ())
    assert places.visible(range(3)) == "a,d,c"
    assert places.gpu_of(1) == "d"


def test_one_worker_is_replaced_beside_others_that_keep_their_gpus() -> None:
    places = GpuPlaces(GPUS, 3)
    places.excluded |= {"a", "c"}  # the worker on c still runs
    assert places.make_room({0}, {1, 2})
    assert places.visible({0, 1, 2}) == "d,b"
    places = GpuPlaces(GPUS, 3)
    places.excluded |= {"a", "c"}
    assert places.make_room({2}, {0, 1})
    assert places.visible({0, 1, 2}) == "a,b,d", "the place before a running worker is kept"


def test_too_few_are_too_few_and_shared_ones_may_be_fewer() -> None:
    places = GpuPlaces(GPUS, 4)
    places.excluded.add("c")
    assert not places.make_room(range(4), ())
    assert places.num_left() == 3
    shared = GpuPlaces(("a", "b"), 4)
    shared.excluded.add("a")
    assert shared.make_room(range(4), ())
    assert shared.visible(range(4)) == "b"
    shared.excluded.add("b")
    assert not shared.make_room(range(4), ())


@given(st.integers(1, 8), st.data())
def test_workers_that_start_have_sound_gpus_of_their_own(num_gpus: int, data: st.DataObject) -> None:
    gpus = [f"gpu{number}" for number in range(num_gpus)]
    num_workers = data.draw(st.integers(1, num_gpus))
    running = data.draw(st.sets(st.integers(0, num_workers - 1)))
    starting = set(range(num_workers)) - running
    places = GpuPlaces(gpus, num_workers)
    places.excluded |= data.draw(st.sets(st.sampled_from(gpus)))
    held = {one: places.gpu_of(one) for one in running}
    num_free = len(set(gpus) - places.excluded - set(held.values()))
    assert places.make_room(starting, running) == (num_free >= len(starting) if places.excluded else True)
    assert all(places.gpu_of(one) == gpu for one, gpu in held.items())
    if num_free >= len(starting) and places.excluded:
        seen = (places.visible(range(num_workers)) or "").split(",")
        taken = [seen[one] for one in sorted(starting)]
        assert not set(taken) & (places.excluded | set(held.values()))
        assert len(set(taken)) == len(taken)
        # What follows them in the list is numbered for nobody.
        assert all(seen[one] == gpu for one, gpu in held.items() if one < max(starting, default=0))
