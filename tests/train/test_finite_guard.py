"""A gradient that is not finite changes nothing, whether the host decides that or the optimizer's kernel."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import NonFiniteLoss
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

STEPS, BAD_STEP, CLIP = 6, 3, 0.05


@dataclass
class _Seen:
    losses: list[float]
    message: str
    is_kept: bool
    """Whether parameters and the optimizer's state were after the bad step what they were before."""


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)


def _batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 8, generator=generator).to(device), torch.arange(12).to(device) % 3


def _held(engine: Engine) -> list[Tensor]:
    state = [value for one in engine.optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    return [getattr(one, "_local_tensor", one).detach().clone() for one in [*engine.unwrapped.parameters(), *state]]


def bad_gradient(device: str, fused: bool, mesh: dict[str, int]) -> _Seen:
    """The loss is finite at every step, the gradient of one rank is not at one of them; runs on every rank."""
    model, is_bad = _model(device), False

    def spoil(output: Tensor) -> None:
        output.register_hook(lambda grad: grad * float("inf") if is_bad else grad)

    model[1].register_forward_hook(lambda _module, _inputs, output: spoil(output))
    plan = Plan.from_dict({"mesh": mesh, "training": {"gradient_clipping": CLIP}})
    engine = parallelize(model, lambda p: torch.optim.AdamW(p, fused=fused), plan, loss_fn=functional.cross_entropy)
    seen = _Seen([], "", False)
    batch = _batch(device)
    while engine.num_steps < STEPS:
        if engine.num_steps == BAD_STEP and not seen.message:
            before, is_bad = _held(engine), torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            try:
                engine.step(batch)
            except NonFiniteLoss as error:
                seen.message = str(error)
            is_bad = False
            seen.is_kept = all(map(torch.equal, before, _held(engine)))
        seen.losses.append(engine.step(batch))
    return seen


def reference() -> list[float]:
    model = _model("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    points, labels = _batch("cpu")
    losses = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(points), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _check(seen: _Seen) -> None:
    assert "the norm of the gradient of step 4 is" in seen.message
    assert seen.is_kept
    assert seen.losses == pytest.approx(reference(), abs=1e-5)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 1, "shard": 2}], ids=["dp", "shard"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing(world: World, fused: bool, mesh: dict[str, int]) -> None:
    for seen in world.run(bad_gradient, "cpu", fused, mesh):
        _check(seen)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 1, "shard": 1}], ids=["dp", "shard"])
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_gpu_too(world: World, fused: bool, mesh: dict[str, int]) -> None:
    [seen] = world.run(bad_gradient, "cuda", fused, mesh, num_ranks=1, backend="cpu:gloo,cuda:nccl", timeout_s=100)
    _check(seen)
