"""Habits of scripts: errors they rely on, state they look into, arguments that DeepSpeed adds to forward."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.bed.world import World
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.surface import script_helpers
from torsh_distributed.migrate.deepspeed.zero import fp32_weights, optimizer_kinds, param_access

BASE = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}}


class Tied(nn.Module):
    """A weight with two names, a frozen layer, and a layer that the loss may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.spare = nn.Linear(4, 2)

    def forward(self, inputs: Tensor, uses_spare: bool = True) -> Tensor:
        hidden = self.second(torch.tanh(self.frozen(self.first(inputs))))
        return hidden.sum() + self.spare(hidden).sum() if uses_spare else hidden.sum()


class CountedSGD(Optimizer):
    """SGD that counts steps in a tensor of shape (1,), and halves its rate by the count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch returns the closure's loss
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    count = self.state[param].setdefault("count", torch.zeros(1))
                    count += 1
                    param.add_(param.grad, alpha=-group["lr"] / 2 ** count.item())


def made(model: nn.Module, stage: int, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    optimizer = more.pop("optimizer", None)
    given = {"optimizer": optimizer} if isinstance(optimizer, Optimizer) else {}
    config = {**BASE, **({} if given else ADAM), "zero_optimization": {"stage": stage, **(zero or {})}, **more}
    return deepspeed.initialize(model=model, config=config, **given)[0]


def tied() -> Tied:
    torch.manual_seed(3)
    return Tied()


def inputs(step: int, rank: int | None = None) -> Tensor:
    place = dist.get_rank() if rank is None else rank
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + place))


def trained(engine: Any, steps: range, dtype: torch.dtype = torch.float32) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(inputs(step).to(dtype)).float()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def look_into_state(folder: str) -> None:
    """bf16: the inner optimizer's state, shared names in fp32 files, frozen parameters, kinds; runs on ranks."""
    for stage in range(4):
        engine = made(tied(), stage, bf16={"enabled": True})
        trained(engine, range(2), torch.bfloat16)
        inner = engine.optimizer.optimizer.state_dict()
        assert len(inner["state"]) == len(inner["param_groups"][0]["params"]) == 5
        assert all(float(entry["step"]) == 2 for entry in inner["state"].values())
        assert isinstance(engine.optimizer, optimizer_kinds.DeepSpeedZeroOptimizer) == (stage in (1, 2))
        assert isinstance(engine.optimizer, optimizer_kinds.DeepSpeedZeroOptimizer_Stage3) == (stage == 3)
        assert isinstance(engine.optimizer, optimizer_kinds.BF16_Optimizer) == (stage == 0)
        for param in engine.module.frozen.parameters():
            assert param_access.safe_get_full_fp32_param(param) is None
            assert param_access.safe_get_full_grad(param) is None
            assert param_access.safe_get_full_optimizer_state(param, "exp_avg") is None
        engine.save_checkpoint(f"{folder}/{stage}")
        weights = fp32_weights.get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{stage}")
        assert weights.keys() == tied().state_dict().keys()
        assert torch.equal(weights["second.weight"], weights["first.weight"])
        master = param_access.safe_get_full_fp32_param(engine.module.first.weight)
        assert torch.equal(weights["second.weight"], master)
        trained(engine, range(2, 3), torch.bfloat16)
        fp32_weights.load_state_dict_from_zero_checkpoint(engine.module, f"{folder}/{stage}")
        for name, value in engine.module_state_dict().items():
            assert torch.equal(value, weights[name].bfloat16()), (stage, name)
        plain = fp32_weights.load_state_dict_from_zero_checkpoint(tied(), f"{folder}/{stage}")
        assert torch.equal(plain.second.weight, weights["first.weight"])


@pytest.mark.ranks
def test_state_is_where_scripts_look_for_it(world: World, tmp_path: Path) -> None:
    assert world.run(look_into_state, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=80) == [None, None]


def resume_counts(folder: str) -> list[float]:
    """The losses of two steps after a resume, by an optimizer whose state has the shape (1,); runs on ranks."""
    found = []
    for stage in range(4):
        for more in ({}, {"bf16": {"enabled": True}}):
            dtype = torch.bfloat16 if more else torch.float32
            losses = []
            for begins in (True, False):
                model = tied()
                optimizer = CountedSGD([param for param in model.parameters() if param.requires_grad])
                engine = made(model, stage, optimizer=optimizer, **more)
                place = f"{folder}/{stage}{len(more)}"
                if begins:
                    trained(engine, range(2), dtype)
                    engine.save_checkpoint(place)
                else:
                    engine.load_checkpoint(place)
                losses.append(trained(engine, range(2, 4), dtype))
            assert losses[0] == losses[1], (stage, more)
            if not more:
                found += losses[1]
    return found


@pytest.mark.ranks
def test_a_state_of_one_number_is_saved_and_loaded_at_every_stage(world: World, tmp_path: Path) -> None:
    by_rank = world.run(resume_counts, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=80)
    model = tied()
    optimizer = CountedSGD([param for param in model.parameters() if param.requires_grad])
    expected: list[list[float]] = []
    for step in range(4):
        losses = [model(inputs(step, rank)) for rank in range(2)]
        (sum(losses) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append([float(loss.detach()) for loss in losses])
    for rank in range(2):
        assert by_rank[rank] == pytest.approx([expected[2][rank], expected[3][rank]] * 4, rel=1e-4)


class Dropping(nn.Module):
    """Keeps what DeepSpeed passes to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: list[tuple[float, int | None]] = []

    def forward(self, values: Tensor, pld_theta: float = 0.0, curriculum_seqlen: int = 0, **_: Any) -> Tensor:
        self.seen.append((pld_theta, curriculum_seqlen))
        return self.layer(values).sum()


def run_with_extras() -> list[tuple[float, int | None]]:
    """Four updates of two microbatches; runs on ranks."""
    model = Dropping()
    engine = made(
        model,
        1,
        gradient_accumulation_steps=2,
        progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.1},
        curriculum_learning={
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 8,
            "max_difficulty": 32,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 3, "difficulty_step": 8},
        },
    )
    for step in range(8):
        engine.backward(engine(inputs(step)))
        engine.step()
    assert engine.get_pld_theta() == pytest.approx(0.5 * math.exp(-0.3) + 0.5)
    engine.eval()
    engine(inputs(0))
    with pytest.raises(AssertionError, match="takes no argument progressive_layer_drop, pld_theta"):
        made(tied(), 1, progressive_layer_drop={"enabled": True})
    with pytest.raises(AssertionError, match="data_sampling chooses samples by how hard they are"):
        made(tied(), 1, data_efficiency={"enabled": True, "data_sampling": {"enabled": True}})
    made(tied(), 1, data_efficiency={"enabled": False, "data_sampling": {"enabled": True}})
    return model.seen


@pytest.mark.ranks
def test_layer_drop_and_lengths_reach_the_model(world: World) -> None:
    for seen in world.run(run_with_extras, num_ranks=2, backend="torsh", timeout_s=60):
        # The share of an update is that of the last one's number: the first two have 1.
        thetas = [0.5 * math.exp(-0.1 * max(update - 1, 0)) + 0.5 for update in range(4) for _ in range(2)]
        assert [theta for theta, _ in seen[:8]] == pytest.approx(thetas)
        assert [length for _, length in seen[:8]] == [16, 16, 24, 24, 32, 32, 32, 32]
        assert seen[8] == (0.0, 0)  # not in evaluation


def rely_on_errors() -> None:
    """Runs on ranks."""
    for stage in (1, 2):
        strict = made(tied(), stage, {"ignore_unused_parameters": False})
        trained(strict, range(1))
        with pytest.raises(AssertionError, match="were not used in producing loss") as caught:
            strict.backward(strict(inputs(0), uses_spare=False))
            strict.step()
        assert "spare.bias" in str(caught.value)
        relaxed = made(tied(), stage)
        relaxed.backward(relaxed(inputs(0), uses_spare=False))
        relaxed.step()
    model = tied()
    sgd = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    with pytest.raises(AssertionError, match="untested ZeRO Optimizer"):
        made(model, 1, optimizer=sgd, zero_allow_untested_optimizer=False)
    made(model, 1, optimizer=sgd, zero_allow_untested_optimizer=1)
    with pytest.raises(ValueError, match="not supported with ZeRO stage 3"):
        made(tied(), 3, gradient_allreduce_op="sum")
    engine = made(tied(), 1)
    with engine.no_sync(), pytest.raises(AssertionError, match="reentry is unsupported"), engine.no_sync():
        pass
    with pytest.raises(AssertionError, match="Distributed backend is not initialized"):
        dist.destroy_process_group()
        deepspeed.init_distributed(dist_init_required=False)


@pytest.mark.ranks
def test_errors_that_scripts_rely_on_are_raised(world: World) -> None:
    assert world.run(rely_on_errors, num_ranks=2, backend="torsh", timeout_s=60) == [None, None]


def test_leaf_modules_are_found_or_named() -> None:
    model = tied()
    assert script_helpers.set_z3_leaf_modules(model, [nn.Linear]) == script_helpers.get_z3_leaf_modules(model)
    assert len(script_helpers.unset_z3_leaf_modules(model, ["Linear"])) == 4
    found, missing = script_helpers.set_z3_leaf_modules_by_name(model, ["first", "none"], raise_if_not_found=False)
    assert (found, missing) == ([model.first], ["none"])
    found, missing = script_helpers.set_z3_leaf_modules_by_suffix(model, ["cond"])
    assert (found, missing) == ([model.second], [])
    for call in (
        lambda: script_helpers.set_z3_leaf_modules(model, [nn.Conv2d]),
        lambda: script_helpers.set_z3_leaf_modules_by_name(model, ["none"]),
        lambda: script_helpers.set_z3_leaf_modules_by_suffix(model, ["none"]),
    ):
        with pytest.raises(ValueError, match="No modules"):
            call()
