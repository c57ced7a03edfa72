"""CpuAdam against torch's Adam: the same updates whatever the settings, the threads, and who holds the shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, AdamW, Optimizer

from tests.bed.world import World
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel import optim
from torsh_distributed.parallel.offload import StateOffload
from torsh_distributed.parallel.optim import CpuAdam
from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.offload import OffloadConfig
from torsh_distributed.train import parallelize

SHAPES = ((3, 7), (), (1,), (129,), (0, 4), (40, 33))

choices = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-5, 1e-1),
        "betas": st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.9999)),
        "eps": st.floats(1e-10, 1e-3),
        "weight_decay": st.sampled_from((0.0, 0.01, 0.3)),
        "maximize": st.booleans(),
        "decoupled_weight_decay": st.booleans(),
    }
)


@pytest.fixture(params=["compiled", "torch"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of computing it; the compiled one is there wherever these tests run from a checkout with a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(optim, "compiled_kernel", lambda: None)
    elif optim.compiled_kernel() is None:
        pytest.skip("the kernel is not compiled: no C compiler was found at install")
    return str(request.param)


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(optimizer: Optimizer, params: list[nn.Parameter], num_steps: int, *, first: int = 0) -> None:
    for number in range(first, first + num_steps):
        generator = torch.Generator().manual_seed(number)
        for index, param in enumerate(params):
            has_one = index != number % len(
                params
            )  # a parameter without a gradient is left alone, its step not counted
            param.grad = torch.randn(param.shape, generator=generator) * 10.0 ** (index - 3) if has_one else None
        optimizer.step()


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_close(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@given(chosen=choices, seed=st.integers(0, 1000))
def test_updates_are_those_of_torch(chosen: dict[str, Any], seed: int) -> None:
    ours, theirs = parameters(seed), parameters(seed)
    train(CpuAdam(ours, **chosen), ours, 4)
    train(Adam(theirs, **chosen, foreach=False), theirs, 4)
    assert_close(ours, theirs)


def test_both_kernels_compute_the_same_and_keep_torchs_state(kernel: str) -> None:
    ours, theirs = parameters(), parameters()
    one, other = CpuAdam(ours, weight_decay=0.1, decoupled_weight_decay=True), AdamW(theirs, weight_decay=0.1)
    train(one, ours, 3)
    train(other, theirs, 3)
    # Each goes on from what the other has saved.
    saved, given_back = one.state_dict(), other.state_dict()
    other.load_state_dict(saved)
    one.load_state_dict(given_back)
    train(one, ours, 3, first=3)
    train(other, theirs, 3, first=3)
    assert_close(ours, theirs)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    def trained(number: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(size, generator=generator)) for size in (100_003, 7, 400_000)]
        with threads(number):
            optimizer = CpuAdam(params)
            for _ in range(2):
                for param in params:
                    param.grad = torch.randn(param.shape, generator=generator)
                optimizer.step()
        return [param.detach() for param in params]

    alone = trained(1)
    for number in (2, 3, 70):
        for one, other in zip(alone, trained(number), strict=True):
            assert torch.equal(one, other)


def test_parameters_that_are_not_contiguous(kernel: str) -> None:
    values, grads = torch.randn(6, 4), torch.randn(6, 4)
    ours, theirs = nn.Parameter(values.clone().t()), nn.Parameter(values.clone().t().contiguous())
    ours.grad, theirs.grad = grads.clone().t(), grads.clone().t().contiguous()
    CpuAdam([ours]).step()
    Adam([theirs]).step()
    torch.testing.assert_close(ours, theirs)
    # Gradients that lie in another order than their parameters.
    ours.grad, theirs.grad = torch.empty_like(theirs).copy_(grads.t()), grads.clone().t()
    CpuAdam([ours]).step()
    CpuAdam([theirs]).step()
    torch.testing.assert_close(ours, theirs)


def test_groups_schedulers_hooks_and_closures() -> None:
    ours, theirs = parameters(), parameters()
    losses, counts = [], []
    for kind, params in ((CpuAdam, ours), (Adam, theirs)):
        optimizer = kind([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.2}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        calls: list[None] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append(None))

        def closure(params: list[nn.Parameter] = params) -> Tensor:
            loss = torch.stack([param.square().sum() for param in params]).sum()
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            return loss

        for _ in range(3):
            optimizer.zero_grad()
            losses.append(optimizer.step(closure).item())
            scheduler.step()
        counts.append(len(calls))
    assert losses[:3] == pytest.approx(losses[3:])
    assert counts == [3, 3]
    assert_close(ours, theirs)


def test_a_scaled_loss_is_scaled_back_before_the_update() -> None:
    trained = []
    for kind in (CpuAdam, Adam):
        layer = nn.Linear(3, 3)
        nn.init.constant_(layer.weight, 0.5)
        nn.init.zeros_(layer.bias)
        optimizer, scaler = kind(layer.parameters(), lr=0.1, eps=1e-2), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(layer(torch.full((1, 3), 1e-3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        trained.append(layer.weight.detach())
    assert trained[0].isfinite().all(), "the step that overflowed was skipped"
    torch.testing.assert_close(*trained)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_offloaded_state_has_the_same_update(kernel: str, kind: type[Adam]) -> None:
    model, other = nn.Linear(40, 33), nn.Linear(40, 33)
    other.load_state_dict(model.state_dict())
    decoupled = kind is AdamW
    alone = CpuAdam(other.parameters(), lr=0.01, weight_decay=0.1, decoupled_weight_decay=decoupled)
    config = OffloadConfig(enabled=True, params=False, grads=False)
    with StateOffload(model, kind(model.parameters(), lr=0.01, weight_decay=0.1), config) as offload:
        train(offload.optimizer, list(model.parameters()), 3)
    train(alone, list(other.parameters()), 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_what_it_cannot_update_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="fp32 parameters in host memory, not"):
        CpuAdam([nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])
    with pytest.raises(InvalidArgument, match="no amsgrad"):
        CpuAdam([{"params": [nn.Parameter(torch.zeros(3))], "amsgrad": True}])
    given = [nn.Parameter(torch.zeros(3))]
    loaded = CpuAdam(given)
    loaded.load_state_dict(Adam(given, amsgrad=True).state_dict())
    given[0].grad = torch.ones(3)
    with pytest.raises(InvalidArgument, match="no amsgrad"):
        loaded.step()
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = CpuAdam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


MESHES: list[dict[str, Any]] = [
    {"mesh": {"dp": 2}},
    {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
    {"mesh": {"shard": 2}, "fsdp": {"strategy": "shard_grad_op"}},
    {"mesh": {"shard": 2}, "fsdp": {"strategy": "full_shard"}},
]


def losses_of(optimizer: type[Optimizer], sections: dict[str, Any], num_steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 33), nn.Linear(33, 3))
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    plan = Plan.from_dict({**sections, "training": {"gradient_clipping": 0.5}})
    engine = parallelize(model, optimizer(model.parameters(), lr=0.05), plan, loss_fn=functional.mse_loss)  # type: ignore[call-arg]  # a subclass
    mine = next(iter(engine.batches([batch])))
    return [engine.step(mine) for _ in range(num_steps)]


def losses_of_all(optimizer: type[Optimizer]) -> list[list[float]]:
    return [losses_of(optimizer, sections) for sections in MESHES]


def test_sharded_training_is_that_of_torch_in_one_process(world: World) -> None:
    (alone,) = world.run(losses_of, Adam, {}, num_ranks=1)
    for found in world.run(losses_of_all, CpuAdam, backend="torsh", timeout_s=60):
        for losses in found:
            assert losses == pytest.approx(alone, rel=1e-5)
