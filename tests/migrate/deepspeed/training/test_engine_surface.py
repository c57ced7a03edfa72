"""What scripts do with an engine beside training: accumulate in their own ways, save, load, look at parameters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from torsh_distributed.errors import CheckpointError, ConfigurationError, FeatureNotAvailable
from torsh_distributed.migrate import deepspeed
from torsh_distributed.migrate.deepspeed.deepspeed_errors import DeepSpeedMistake
from torsh_distributed.migrate.deepspeed.zero import gathered_parameters, param_access
from torsh_distributed.migrate.deepspeed.zero.fp32_weights import get_fp32_state_dict_from_zero_checkpoint


class Model(nn.Module):
    """Two layers, and one that forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(inputs)))

    def greeting(self) -> str:
        return "hello"


def made(stage: int, gas: int = 1, **more: Any) -> Any:
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        **more,
    }
    return deepspeed.initialize(
        model=Model(), config={key: value for key, value in config.items() if value is not None}
    )


def batch(number: int, rank: int | None = None) -> Tensor:
    place = dist.get_rank() if rank is None else rank
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + place))


def steps(engine: Any, count: int, dtype: torch.dtype = torch.float32) -> list[float]:
    losses = []
    for number in range(count):
        loss = engine(batch(number).to(dtype)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def whole(engine: Any) -> dict[str, Tensor]:
    return {name: value.float().clone() for name, value in engine.module_state_dict().items()}


def _one_process() -> dict[str, Tensor]:
    """Six microbatches of two ranks, two to an update, by torch alone."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for update in range(3):
        for number in (2 * update, 2 * update + 1):
            for rank in range(2):
                (model(batch(number, rank)).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _ways_to_accumulate() -> None:
    """All ways a script may accumulate two microbatches give the update of one process; runs on ranks."""
    expected = _one_process()
    for stage in range(4):
        for way in ("counted", "told", "plain", "no_sync", "unmanaged"):
            if way == "no_sync" and stage > 1:
                engine, *_ = made(stage, 2)
                with pytest.raises(AssertionError, match="incompatible with gradient partitioning"), engine.no_sync():
                    pass
                continue
            engine, *_ = made(stage, 2, scheduler=None, managed_gradient_accumulation=way != "unmanaged")
            for number in range(6):
                loss = engine(batch(number)).square().mean()
                if way == "told":
                    engine.set_gradient_accumulation_boundary(number % 2 == 1)
                assert engine.is_gradient_accumulation_boundary() == (way != "unmanaged" and number % 2 == 1)
                if way == "plain":
                    loss.backward()
                elif way == "no_sync" and number % 2 == 0:
                    with engine.no_sync():
                        engine.backward(loss)
                        with pytest.raises(AssertionError, match=r"illegal to call Engine\.step"):
                            engine.step()
                else:
                    assert torch.equal(engine.backward(loss), loss / 2)
                if way != "unmanaged" or number % 2:
                    if way == "no_sync" and number % 2 == 0:
                        engine.micro_steps += 1
                        continue
                    engine.step()
                    assert engine.was_step_applied() == (number % 2 == 1)
            assert (engine.global_steps, engine.skipped_steps) == (3, 0), way
            for name, value in whole(engine).items():
                torch.testing.assert_close(
                    value, expected[name], rtol=1e-4, atol=1e-6, msg=f"stage {stage} {way} {name}"
                )


def test_every_way_to_accumulate_gives_the_same_update(world: World) -> None:
    world.run(_ways_to_accumulate, num_ranks=2, backend="torsh", timeout_s=90)


def _save(folder: str) -> Any:
    saved = {}
    for stage, dtype in ((1, "bf16"), (3, "fp32"), (2, "fp16")):
        more = {} if dtype == "fp32" else {dtype: {"enabled": True}}
        engine, _, _, scheduler = made(stage, **more)
        torch_dtype = next(engine.module.parameters()).dtype
        steps(engine, 3, torch_dtype)
        engine.save_checkpoint(
            f"{folder}/{stage}", client_state={"epoch": 2}, tag=None if stage == 1 else f"tag{stage}"
        )
        before = whole(engine)
        more_losses = steps(engine, 2, torch_dtype)
        saved[stage] = (before, more_losses, scheduler.last_batch_iteration)
        assert engine.save_16bit_model(f"{folder}/{stage}", "weights.bin")
        if stage == 1:
            assert (Path(folder) / "1" / "latest").read_text() == "global_step3"
    mine = f"mine{dist.get_rank()}"
    with pytest.raises(AssertionError, match="not consistent across all ranks"):
        made(0, checkpoint={"tag_validation": "FAIL"})[0].save_checkpoint(folder, tag=mine)
    for mode in ("WARN", "IGNORE"):
        made(0, checkpoint={"tag_validation": mode})[0].save_checkpoint(f"{folder}/{mode}", tag=mine)
        assert [path.name for path in Path(f"{folder}/{mode}").iterdir() if path.is_dir()] == ["mine0"]
    return saved


def _load(folder: str) -> Any:
    found = {}
    for stage, dtype in ((1, "bf16"), (3, "fp32"), (2, "fp16")):
        more = {} if dtype == "fp32" else {dtype: {"enabled": True}}
        engine, _, _, scheduler = made(stage, **more)
        torch_dtype = next(engine.module.parameters()).dtype
        steps(engine, 1, torch_dtype)
        path, client_state = engine.load_checkpoint(f"{folder}/{stage}")
        assert path is not None
        assert client_state == {"epoch": 2}
        assert (engine.global_steps, engine.global_samples) == (3, 12)
        before = whole(engine)
        losses = steps(engine, 2, torch_dtype)
        found[stage] = (before, losses, scheduler.last_batch_iteration)
    nothing, *_ = made(0)
    assert nothing.load_checkpoint(f"{folder}/nowhere") == (None, None)
    (Path(folder) / "foreign" / "tag").mkdir(parents=True, exist_ok=True)
    with pytest.raises(CheckpointError, match="tag"):
        nothing.load_checkpoint(f"{folder}/foreign", tag="tag")
    alone, *_ = made(0)
    alone.load_checkpoint(f"{folder}/3", load_module_only=True)
    assert alone.global_steps == 0
    found["alone"] = whole(alone)
    return found


def test_checkpoints_resume_at_once_and_in_another_world_and_stage(world: World, tmp_path: Path) -> None:
    saved = world.run(_save, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=60)[0]
    again = world.run(_load, str(tmp_path), num_ranks=2, backend="torsh", timeout_s=60)[0]
    for stage in (1, 2, 3):
        before, losses, iteration = saved[stage]
        assert again[stage][1] == pytest.approx(losses, rel=1e-6), stage
        assert again[stage][2] == iteration
        for name, value in before.items():
            assert torch.equal(again[stage][0][name], value), (stage, name)
    (one,) = world.run(_load, str(tmp_path), num_ranks=1, backend="torsh", timeout_s=60)
    for name, value in saved[3][0].items():
        assert torch.equal(one["alone"][name], value)
        assert torch.equal(one[1][0][name], saved[1][0][name])
    masters = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "1"))
    assert masters["first.weight"].dtype is torch.float32
    assert torch.equal(masters["first.weight"].bfloat16().float(), saved[1][0]["first.weight"])
    weights = torch.load(tmp_path / "3" / "weights.bin", weights_only=True)
    assert weights.keys() == saved[3][0].keys()


def _look_at_parameters() -> None:
    """Whole parameters, their masters and the optimizer's state, changed by hand; runs on ranks."""
    for stage in range(4):
        engine, optimizer, loader, scheduler = made(stage, bf16={"enabled": True})
        assert loader is None
        assert engine.greeting() == "hello"
        with pytest.raises(AttributeError, match="no attribute 'farewell'"):
            engine.farewell()
        steps(engine, 1, torch.bfloat16)
        weight = engine.module.first.weight
        assert param_access.safe_get_full_fp32_param(weight).shape == (6, 4)
        assert param_access.safe_get_full_optimizer_state(weight, "exp_avg").shape == (6, 4)
        with gathered_parameters.GatheredParameters(weight, modifier_rank=1):
            if dist.get_rank() == 1:
                nn.init.constant_(engine.module.first.weight, 0.25)
        assert torch.equal(whole(engine)["first.weight"], torch.full((6, 4), 0.25))
        master = param_access.safe_get_full_fp32_param(engine.module.first.weight)
        assert torch.equal(master, torch.full((6, 4), 0.25)), stage
        param_access.safe_set_full_fp32_param(engine.module.first.weight, torch.full((6, 4), 0.5))
        assert torch.equal(whole(engine)["first.weight"], torch.full((6, 4), 0.5))
        assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups] == scheduler.get_last_lr()
        assert engine.get_batch_info() == (4, 2, 1)
        engine.set_train_batch_size(8)
        assert engine.gradient_accumulation_steps() == 2
        assert engine.zero_optimization_stage() == stage
        assert engine.bfloat16_enabled()
        assert engine.zero_reduce_bucket_size() == 500_000_000
        if stage < 3:
            assert engine.module.state_dict()["first.weight"].shape == (6, 4)
            assert not hasattr(engine.module.state_dict()["first.weight"], "to_local")
        engine.eval()
        with torch.no_grad():
            assert engine(batch(0).bfloat16()).shape == (2, 2)
        engine.train()
        engine.destroy()


def test_parameters_can_be_looked_at_and_changed(world: World) -> None:
    world.run(_look_at_parameters, num_ranks=2, backend="torsh", timeout_s=60)


def _mistakes(folder: str) -> None:
    (Path(folder) / "ds.json").write_text(json.dumps({"train_batch_size": 4}))
    with pytest.raises(DeepSpeedMistake, match="requires a model"):
        deepspeed.initialize(config={"train_batch_size": 4})
    with pytest.raises(AssertionError, match="were given deepspeed configs in the deepspeed arguments"):
        args = type("Args", (), {"deepspeed_config": f"{folder}/ds.json"})()
        deepspeed.initialize(args=args, model=Model(), config={"train_batch_size": 4})
    with pytest.raises(AssertionError, match="train_batch_size 5"):
        deepspeed.initialize(model=Model(), config={"train_batch_size": 5, "train_micro_batch_size_per_gpu": 2})
    typo = {"train_batch_size": 4, "gradient_clipp1ng": 1.0}
    deepspeed.initialize(model=Model(), config=typo)
    os.environ["TORSH_STRICT_CONFIG"] = "1"
    with pytest.raises(ConfigurationError, match="gradient_clipping"):
        deepspeed.initialize(model=Model(), config=typo)
    with pytest.raises(FeatureNotAvailable, match="hybrid_engine"):
        made(0, hybrid_engine={"enabled": True})
    del os.environ["TORSH_STRICT_CONFIG"]
    made(0, hybrid_engine={"enabled": True})
    with pytest.raises(AssertionError, match="cannot be simultaneously enabled"):
        made(0, fp16={"enabled": True}, bf16={"enabled": True})
    with pytest.raises(FeatureNotAvailable, match="quantize_training"):
        made(0, quantize_training={"enabled": True})
    with pytest.raises(FeatureNotAvailable, match="OneBitAdam"):
        made(0, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}})
    engine, *_ = made(1, 2, fp16={"enabled": True})
    with pytest.raises(AssertionError, match="scalar tensor"):
        engine.backward(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="without scaling the loss"):
        engine(batch(0).half()).float().mean().backward()


def test_mistakes_are_named(world: World, tmp_path: Path) -> None:
    world.run(_mistakes, str(tmp_path), num_ranks=1, backend="torsh", timeout_s=60)
