"""Elastic training: restored after a failure, kept after a change of members, exact samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torsh_distributed.migrate.horovod as hvd
from tests.bed.world import World
from torsh_distributed.migrate.horovod.elastic.elastic_sampler import ElasticSampler
from torsh_distributed.migrate.horovod.world_state import WorldState


def recover() -> dict[str, object]:
    hvd.init()
    me = hvd.rank()
    torch.manual_seed(me)
    model = nn.Linear(300, 300)  # large enough to be reduced in shared memory
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=0, log=[])
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, factor: float) -> float:
        calls.append(state.batch)
        while state.batch < 6:
            state.optimizer.zero_grad()
            (state.model(torch.ones(300)) * factor).sum().backward()
            state.optimizer.step()
            state.batch += 1
            state.log.append(state.batch)
            if state.batch == 2:
                state.commit()
            if state.batch == 4 and len(calls) == 1:
                # The ranks disagree: all of them get the error, and go back to batch 2.
                hvd.allreduce(torch.ones(me + 1), name="broken")
            if state.batch == 5 and len(calls) == 2:
                if me == 0:
                    state.on_hosts_updated(1.0, 0)
                state.check_host_updates()
        return float(state.model.weight.detach().sum())

    result = train(state, 2.0)
    log = list(state.log)
    weights = hvd.allgather(state.model.weight.detach())
    assert torch.equal(weights[:300], weights[300:])
    replaced = nn.Linear(300, 300)
    state.model = replaced
    state.restore()
    assert torch.equal(replaced.weight, state.model.weight)
    plain = hvd.elastic.ObjectState(epoch=me, seen=[me])
    plain.sync()
    assert (plain.epoch, plain.seen) == (0, [0])
    plain.epoch = 5
    plain.restore()
    assert plain.epoch == 0
    return {"calls": calls, "resets": resets, "log": log, "result": result}


def limited() -> None:
    hvd.init()
    calls = []

    @hvd.elastic.run
    def train(state: hvd.elastic.ObjectState) -> None:
        calls.append(1)
        raise hvd.HorovodInternalError("again")

    with pytest.raises(hvd.HorovodInternalError, match="again"):
        train(hvd.elastic.ObjectState(epoch=0))
    assert len(calls) == 3


def exact() -> list[int]:
    """Samples recorded by any rank are not dealt out again; the rest are, once."""
    hvd.init()
    me = hvd.rank()
    sampler = hvd.elastic.ElasticSampler(range(11), seed=3, exactly_once=True)
    state = hvd.elastic.TorchState(sampler=sampler)
    done = sampler.get_indices(0, 2)
    sampler.record_batch(0, 2)
    state.sync()
    rest = list(sampler)
    everyone = hvd.allgather_object(done + rest)
    assert sorted(index for one in everyone for index in one) == list(range(11))
    assert len(sampler) == len(rest)
    return [me, sampler.processed_num]


def test_training_continues_from_the_last_commit_and_with_the_state_of_rank_0(world: World) -> None:
    first, second = world.run(recover, num_ranks=2, backend=None)
    assert first == second
    assert first["calls"] == [0, 2, 5]
    assert first["resets"] == [2, 5]
    assert first["log"] == [1, 2, 3, 4, 5, 6]


def test_resets_are_limited_and_samples_are_exact(world: World) -> None:
    world.run(limited, num_ranks=1, backend=None, env={"HOROVOD_RESET_LIMIT": "2"})
    assert world.run(exact, num_ranks=2, backend=None) == [[0, 4], [1, 4]]


def test_a_sampler_deals_out_the_rest_again_padded_as_horovod_does(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ElasticSampler(range(10), shuffle=False)
    assert list(sampler) == list(range(10))
    place = "torsh_distributed.migrate.horovod.elastic.elastic_sampler"
    monkeypatch.setattr(f"{place}.is_up", lambda: True)
    ranks = [WorldState(rank, 4, 0, 4, 0, 1, True, [0, 1, 2, 3], None, False, False) for rank in range(4)]  # type: ignore[arg-type]
    dealt = []
    for one in ranks:
        monkeypatch.setattr(f"{place}.world", lambda one=one: one)
        sampler.load_state_dict({"epoch": 0, "processed_num": 4})
        dealt.append(list(sampler))
        assert len(sampler) == 2
    assert dealt == [[4, 8], [5, 9], [6, 4], [7, 5]]
    sampler.record_batch(0, 1)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 8}
    sampler.set_epoch(1)
    assert sampler.processed_num == 0
    assert ElasticSampler(range(10), seed=1).state_dict()["epoch"] == 0
