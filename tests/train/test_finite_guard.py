"""A gradient that is not finite changes nothing, clipped or not, whether the host decides or the optimizer's kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bed.world import World
from torsh_distributed.errors import NonFiniteLoss
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

STEPS, BAD_STEP, CLIP = 6, 3, 0.05


def _offload(*, pages: bool) -> dict[str, bool]:
    return {"enabled": True, "offload_params": pages, "offload_grads": pages}


PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"dp": 2}},
    "shards": {"mesh": {"dp": 1, "shard": 2}},
    "partly sharded": {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"ignored_modules": ["2"]}},
    "zero1": {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
    "offloaded state": {"mesh": {"dp": 2}, "offload": _offload(pages=False)},
    "paged": {"mesh": {"dp": 2}, "offload": _offload(pages=True)},
    "pipeline": {"mesh": {"dp": 1, "pp": 2}, "pipeline": {"num_microbatches": 2}},
}


@dataclass
class _Seen:
    losses: list[float]
    message: str
    is_kept: bool
    """Whether parameters and the optimizer's state were after the bad step what they were before."""


def _model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)


def _batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 8, generator=generator).to(device), torch.arange(12).to(device) % 3


def _tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state.detach().clone()]
    values = state.values() if isinstance(state, dict) else []
    return [tensor for value in values for tensor in _tensors(value)]


def _held(engine: Engine) -> list[Tensor]:
    state = engine.state_dict()
    return [*_tensors(state["model"]), *_tensors(state["optimizer"]["state"])]


class _Spoilt(nn.Tanh):
    """A layer whose gradient is infinite while `is_bad`; its output is as ever."""

    is_bad = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad and self.is_bad:
            out.register_hook(lambda grad: grad * float("inf"))
        return out


def bad_gradient(device: str, fused: bool, sections: dict[str, Any], clip: float | None) -> _Seen:
    """The loss is finite at every step, the gradient of the last rank is not at one of them; runs on every rank."""
    model = _model(device)
    model[1] = spoilt = _Spoilt()
    plan = Plan.from_dict({**sections, "training": {"gradient_clipping": clip}})
    engine = parallelize(model, lambda p: torch.optim.AdamW(p, fused=fused), plan, loss_fn=functional.cross_entropy)
    is_bad_here = plan.mesh.pp > 1 or torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    seen = _Seen([], "", False)
    batch = _batch(device)
    while engine.num_steps < STEPS:
        if engine.num_steps == BAD_STEP and not seen.message:
            before, spoilt.is_bad = _held(engine), is_bad_here
            try:
                engine.step(batch)
                engine.settle()
            except NonFiniteLoss as error:
                seen.message = str(error)
            spoilt.is_bad = False
            seen.is_kept = all(map(torch.equal, before, _held(engine)))
        seen.losses.append(engine.step(batch))
    return seen


def reference(clip: float | None) -> list[float]:
    model = _model("cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    points, labels = _batch("cpu")
    losses = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(points), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _check(seen: _Seen, clip: float | None) -> None:
    assert "the norm of the gradient of step 4 is" in seen.message
    assert seen.is_kept
    assert seen.losses == pytest.approx(reference(clip), abs=1e-5)


def whole_and_clipped(name: str) -> tuple[_Seen, _Seen]:
    is_fused = name in ("replicas", "shards")
    return bad_gradient("cpu", False, PLANS[name], None), bad_gradient("cpu", is_fused, PLANS[name], CLIP)


@pytest.mark.parametrize("name", PLANS)
def test_a_gradient_that_is_not_finite_changes_nothing(world: World, name: str) -> None:
    for whole, clipped in world.run(whole_and_clipped, name):
        _check(whole, None)
        _check(clipped, CLIP)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("clip", [None, CLIP], ids=["whole", "clipped"])
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_gpu_too(world: World, fused: bool, clip: float | None) -> None:
    sections = {"mesh": {"dp": 1}}
    [seen] = world.run(
        bad_gradient, "cuda", fused, sections, clip, num_ranks=1, backend="cpu:gloo,cuda:nccl", timeout_s=100
    )
    _check(seen, clip)
