"""Engines of real ranks: any order, disagreement, lost and leaving ranks, stalls, timelines."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path

import pytest
import torch

import torsh_distributed.migrate.horovod as hvd
from tests.bed.world import World
from torsh_distributed.migrate.horovod import world_state


def names_in_any_order() -> None:
    """Each rank submits in an order of its own, waits in another, and gets the right tensors."""
    hvd.init()
    me, size = hvd.rank(), hvd.size()
    order = random.Random(me)
    for round_ in range(12):
        shared = random.Random(round_)
        shapes = [(shared.randrange(0, 4), shared.randrange(1, 5)) for _ in range(shared.randrange(1, 30))]
        indices = list(range(len(shapes)))
        order.shuffle(indices)
        handles = {}
        for index in indices:
            tensor = torch.full(shapes[index], float(index + me))
            if index % 3 == 0:
                handles[index] = hvd.allgather_async(tensor, name=f"op{index}")
            elif index % 3 == 1:
                handles[index] = hvd.broadcast_async(tensor, index % size, name=f"op{index}")
            else:
                handles[index] = hvd.allreduce_async(tensor, name=f"op{index}", op=hvd.Sum)
        order.shuffle(indices)
        for index in indices:
            result = hvd.synchronize(handles[index])
            if index % 3 == 0:
                expected = torch.cat([torch.full(shapes[index], float(index + rank)) for rank in range(size)])
            elif index % 3 == 1:
                expected = torch.full(shapes[index], float(index + index % size))
            else:
                expected = torch.full(shapes[index], float(sum(index + rank for rank in range(size))))
            torch.testing.assert_close(result, expected, rtol=0, atol=0)


def disagree() -> list[str]:
    """Every kind of difference is an error on every rank, and the next operation works."""
    hvd.init()
    me = hvd.rank()
    texts = []
    calls = [
        lambda: hvd.allreduce(torch.zeros(me + 1), name="shape"),
        lambda: hvd.allreduce(torch.zeros(2, dtype=(torch.float32, torch.float64)[me]), name="dtype"),
        lambda: hvd.allreduce(torch.zeros(2), name="op", op=(hvd.Sum, hvd.Max)[me]),
        lambda: hvd.allreduce(torch.zeros(2), name="scale", prescale_factor=me + 1.0),
        lambda: hvd.broadcast(torch.zeros(2), me, name="root"),
        lambda: hvd.allgather(torch.zeros(2, me + 1), name="rows"),
        lambda: hvd.alltoall(torch.zeros((2, 2) if me else (2,)), name="dims"),
        lambda: hvd.grouped_allreduce([torch.zeros(2)] * (me + 1), name="count"),
    ]
    for call in calls:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        texts.append(caught.value.message)
        assert hvd.allreduce(torch.ones(1), name="still works", op=hvd.Sum).item() == hvd.size()
    # The same name with another shape, after it has a number.
    for _ in range(3):
        hvd.allreduce(torch.zeros(4), name="again")
    with pytest.raises(hvd.HorovodInternalError, match="mismatched shapes"):
        hvd.allreduce(torch.zeros(4 if me else 5), name="again")
    assert hvd.allreduce(torch.ones(4), name="again").sum() == 4
    return texts


def twice_and_barrier() -> None:
    """A name in flight is refused at once; a barrier passes an operation that waits; polls see it wait."""
    hvd.init()
    me = hvd.rank()
    if me == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="waits")
        with pytest.raises(ValueError, match="in flight"):
            hvd.allreduce_async(torch.ones(2), name="waits")
        assert not hvd.poll(handle)
    hvd.barrier()
    if me == 1:
        handle = hvd.allreduce_async(torch.ones(2), name="waits")
    assert hvd.synchronize(handle).tolist() == [1.0, 1.0]
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is None


def few_numbers() -> None:
    """More names than the cache holds, used in waves."""
    repeated_bursts()
    hvd.init()
    for wave in range(6):
        handles = [hvd.allreduce_async(torch.tensor([float(i)]), name=f"n{i}", op=hvd.Sum) for i in range(wave, 12)]
        assert [hvd.synchronize(one).item() for one in handles] == [2.0 * i for i in range(wave, 12)]


def repeated_bursts() -> None:
    """The same many small operations again and again, which then share what was kept of the last time."""
    hvd.init()
    me, size = hvd.rank(), hvd.size()
    shapes = [(), (3,), (2, 2), (0,), (16,), (1, 5)]
    kept = []
    for round_ in range(6):
        handles = []
        for index in range(40):
            tensor = torch.full(shapes[index % len(shapes)], float(index + me + round_))
            call = hvd.allreduce_async_ if index % 4 < 3 or round_ % 2 else hvd.allreduce_async
            op = hvd.Sum if index % 5 else hvd.Average
            handles.append((index, tensor, call(tensor, name=f"burst{index}", op=op)))
        if round_ == 4 and me == 0:
            handles.append((40, torch.ones(1), hvd.allreduce_async(torch.ones(1), name="between")))
        for index, tensor, handle in handles[:40]:
            result = hvd.synchronize(handle)
            wanted = sum(index + rank + round_ for rank in range(size)) / (1 if index % 5 else size)
            kept.append((result, torch.full(tensor.shape, float(wanted))))
        if round_ == 4 and me == 1:
            handles.append((40, torch.ones(1), hvd.allreduce_async(torch.ones(1), name="between")))
        for _, _, handle in handles[40:]:
            assert hvd.synchronize(handle).item() == 1.0
    for result, expected in kept:  # also those of earlier rounds: nothing wrote over them
        assert torch.equal(result, expected)


def lifecycle() -> None:
    """Any number of starts; operations in flight fail when a rank leaves."""
    for turn in range(3):
        hvd.init()
        hvd.init()
        assert hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item() == 1.0
        assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1]}
        if hvd.rank() == turn % 2:
            with pytest.raises(hvd.HorovodInternalError, match="shut down"):
                hvd.allreduce(torch.ones(1), name="one-sided")  # the other leaves before or after this is submitted
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)\."):
            hvd.rank()


def test_operations_meet_by_name_and_disagreement_is_an_error_everywhere(world: World) -> None:
    world.run(several, [names_in_any_order, twice_and_barrier, repeated_bursts], num_ranks=2, backend=None)
    world.run(names_in_any_order, num_ranks=3, backend="gloo")
    first, second = world.run(several, [lifecycle, disagree], num_ranks=2, backend=None)
    assert first == second
    words = [text.split(": ")[1] for text in first[1]]
    assert words[0] == "mismatched shapes"
    assert words[4] == "mismatched root ranks"


def several(functions: list) -> list:
    """Several checks in one world."""
    results = []
    for function in functions:
        results.append(function())
        hvd.shutdown()
    return results


def test_a_small_cache_and_no_packing_change_nothing(world: World) -> None:
    env = {"HOROVOD_CACHE_CAPACITY": "3", "HOROVOD_FUSION_THRESHOLD": "0"}
    world.run(few_numbers, num_ranks=2, backend=None, env=env)


def lose_a_rank() -> str:
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if hvd.rank() == 1:
        os._exit(3)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name="alone")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(1), name="later")
    return caught.value.message


def test_a_lost_rank_fails_what_waits_for_it_at_once(world: World) -> None:
    outcomes = world.outcomes(lose_a_rank, num_ranks=2, backend=None)
    assert outcomes[1].exit_code == 3
    assert "rank 1 is gone" in outcomes[0].value


def test_a_stall_is_reported_and_ends_and_the_timeline_shows_what_ran(world: World, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(timeline), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    results = world.run(wait_alone, str(tmp_path), num_ranks=2, backend=None, env=env)
    assert "allreduce.forgotten has waited" in results[1]
    assert "have not submitted it: 0" in results[1]
    events = json.loads(timeline.read_text())
    names = {event["name"] for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START", "process_name"} <= names
    assert "allreduce.first" in timeline.read_text()


def wait_alone(folder: str) -> str:
    hvd.init()
    assert hvd.allreduce(torch.ones(1), name="first").item() == 1
    text = ""
    marker, begin = Path(folder) / "fifo", Path(folder) / "begin"
    if hvd.rank() == 0:
        os.mkfifo(marker)
        os.mkfifo(begin)
    hvd.barrier()
    if hvd.rank() == 0:
        # Not from the start: on a busy machine a rank may be late for the operations before.
        engine = world_state.world().sets[0].engine
        assert engine is not None
        engine._settings = dataclasses.replace(engine._settings, stall_warning_s=0.2, stall_shutdown_s=0.4)
        begin.write_text("begin")
    if hvd.rank() == 1:
        begin.read_text()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            hvd.allreduce(torch.ones(1), name="forgotten")
        text = caught.value.message
        marker.write_text("done")
    else:
        assert marker.read_text() == "done"  # rank 0 takes no part until the other has given up
    hvd.shutdown()
    return text
