"""The batch-size planner: memory is measured, the equation holds, all ranks agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument, MemoryAllocationFailed
from torsh_distributed.train.batch_size import BatchSizeConfig, LiveBytes, plan_batch_size, split_batch

WIDTH = 64


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers).eval()


def make_batch(num_samples: int) -> tuple[Tensor, Tensor]:
    return torch.ones(num_samples, WIDTH), torch.zeros(num_samples, WIDTH)


def measured_by_hand(num_samples: int) -> int:
    """Peak bytes of a step with that many samples, model included."""
    model = make_model()
    with LiveBytes() as live:
        functional.mse_loss(model(make_batch(num_samples)[0]), make_batch(num_samples)[1]).backward()
    return live.peak + sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 16))
def test_the_batch_is_micro_times_accumulation_times_replicas(target: int, largest: int, degree: int) -> None:
    micro, accumulation = split_batch(target, largest_micro=largest, data_degree=degree)
    assert 1 <= micro <= largest
    assert micro * accumulation * degree >= target
    assert (accumulation - 1) * largest * degree < target, "no pass too many"
    assert micro * accumulation * degree - target < accumulation * degree, "no sample too many in a pass"


def test_bytes_of_tensors_are_counted_while_they_live() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000)
        second = first.view(10, 100) * 2
        assert live.now == 8000
        view = second.t()
        del first, second
        assert live.now == 4000
        view.add_(1)
        assert live.now == 4000
        del view
    assert (live.now, live.peak) == (0, 8000)


@pytest.mark.parametrize("target", [8, 500, 100_000])
def test_the_microbatch_fits_the_budget_and_little_more_would(target: int) -> None:
    budget = measured_by_hand(200)
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = plan_batch_size(
        model, make_batch, loss_fn=functional.mse_loss, memory_bytes=budget + 1000, reserved_bytes=1000, target=target
    )
    assert found.effective_batch_size == found.micro_batch_size * found.gradient_accumulation >= target
    assert found.peak_bytes == measured_by_hand(found.largest_micro_batch_size) <= budget
    if target > 200:
        assert 200 - 200 // 15 <= found.largest_micro_batch_size <= 200
        assert found.gradient_accumulation > 1
    else:
        assert (found.micro_batch_size, found.gradient_accumulation) == (8, 1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(param.grad is None for param in model.parameters())


def on_ranks_with_other_budgets() -> BatchSizeConfig:
    budget = measured_by_hand(40 if dist.get_rank() == 1 else 100)
    return plan_batch_size(make_model(), make_batch, loss_fn=functional.mse_loss, memory_bytes=budget, target=1000)


def test_all_ranks_agree_on_the_smallest(world: World) -> None:
    first, second = world.run(on_ranks_with_other_budgets)
    assert first == second
    assert 37 <= first.largest_micro_batch_size <= 40
    assert first.effective_batch_size == first.micro_batch_size * first.gradient_accumulation * 2 >= 1000


def too_little_on_one_rank() -> None:
    budget = measured_by_hand(4) if dist.get_rank() == 0 else 1000
    plan_batch_size(make_model(), make_batch, loss_fn=functional.mse_loss, memory_bytes=budget)


def test_a_budget_below_one_sample_is_refused_on_every_rank(world: World) -> None:
    outcomes = world.outcomes(too_little_on_one_rank)
    assert [type(outcome.error) for outcome in outcomes] == [MemoryAllocationFailed] * 2
    with pytest.raises(InvalidArgument, match="reserved_bytes=11"):
        plan_batch_size(make_model(), make_batch, memory_bytes=10, reserved_bytes=11)


def test_without_a_target_the_batch_grows_with_the_root_of_the_replicas() -> None:
    found = plan_batch_size(make_model(), make_batch, loss_fn=functional.mse_loss, memory_bytes=2**26, data_degree=4)
    assert found.effective_batch_size == 64
    assert found.local_batch_size == 16


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))


def plain_batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, 64), torch.zeros(count, 64)


def test_a_model_without_memory_gets_an_estimate_near_the_trial() -> None:
    with torch.device("meta"):
        without = plain_model()
    tried, found = (
        plan_batch_size(
            model, plain_batch, loss_fn=functional.mse_loss, memory_bytes=2**26, target=10**6, data_degree=1
        )
        for model in (plain_model(), without)
    )
    assert (tried.is_measured, found.is_measured) == (True, False)
    assert found.largest_micro_batch_size == pytest.approx(tried.largest_micro_batch_size, rel=0.25)
    assert found.effective_batch_size == found.micro_batch_size * found.gradient_accumulation >= 10**6
    assert found.peak_bytes <= 2**26
    with pytest.raises(MemoryAllocationFailed):
        plan_batch_size(without, plain_batch, loss_fn=functional.mse_loss, memory_bytes=100, data_degree=1)
