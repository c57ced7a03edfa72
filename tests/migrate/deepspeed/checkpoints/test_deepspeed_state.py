"""Checkpoints of DeepSpeed: the same weights and moments that its own tools read, and training that goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW
from typer.testing import CliRunner

from tests.bed.world import World
from tests.migrate.deepspeed.checkpoints.conftest import RealCheckpoints
from tests.migrate.deepspeed.checkpoints.making import (
    FURTHER,
    NUM_FURTHER,
    NUM_STEPS,
    QUICK,
    Made,
    OddModel,
    batch_of,
    groups_of,
    loss_of,
    make_pipeline,
)
from tests.migrate.deepspeed.conftest import DeepSpeedWorld
from torsh_distributed.cli.app import app
from torsh_distributed.errors import CheckpointError
from torsh_distributed.migrate.deepspeed import fp32_weights, load_deepspeed, open_checkpoint, write_weights
from torsh_distributed.migrate.deepspeed.checkpoints.deepspeed_state import find_files
from torsh_distributed.plan import Plan
from torsh_distributed.train import Engine, parallelize

pytestmark = [pytest.mark.needs_deepspeed, pytest.mark.matrix]

MATRICES = ["embedding.weight", "middle.weight", "back.weight"]
VECTORS = ["norm.weight", "norm.bias", "middle.bias", "back.bias"]
PLANS: dict[str, dict[str, dict[str, object]]] = {
    "replicas": {"mesh": {"dp": 2}},
    "shard_optimizer": {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_optimizer"}},
    "shard_grad_op": {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_grad_op"}},
    "full_shard": {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "full_shard"}},
    "offload": {
        "mesh": {"dp": 1, "shard": 2},
        "offload": {"enabled": True, "params": False, "grads": False, "optimizer_state": True},
    },
}


def _state_differences(made: Made, source: Path) -> list[str]:
    """What is not as ds_to_universal wrote it."""
    state = open_checkpoint(source)
    wrong = [name for name in (*MATRICES, *VECTORS) if name not in made.universal]
    for name in (*MATRICES, *VECTORS):  # it also has 16-bit copies of tied and frozen weights
        for entry, expected in made.universal[name].items():
            full = f"model.{name}" if entry == "fp32" else f"optimizer.state.{name}.{entry}"
            if not torch.equal(state.whole(full).flatten(), expected.flatten()):
                wrong.append(f"{source}: {full}")
        if state.whole(f"optimizer.state.{name}.step") != NUM_STEPS - state.facts.skipped_steps:
            wrong.append(f"{source}: step of {name}")
    groups = state.values["optimizer"]["param_groups"]
    if [group["params"] for group in groups] != [MATRICES, VECTORS]:
        wrong.append(f"{source}: groups")
    decays = [group.get("weight_decay", "not in the file") for group in groups]
    return wrong if decays in ([0.1, 0.0], ["not in the file"] * 2) else [*wrong, f"{source}: weight_decay"]


def _weight_differences(made: Made, source: Path) -> list[str]:
    """What is not as zero_to_fp32 reads it."""
    found = fp32_weights(source)
    missing = [name for name in (*OddModel().state_dict(), *made.weights) if name not in found]
    differ = [name for name, value in made.weights.items() if not torch.equal(found[name].float(), value.float())]
    return missing + differ


@pytest.mark.parametrize("case", [case for case in QUICK if case[0] != "0"])
def test_weights_and_moments_are_what_deepspeeds_tools_read(real: RealCheckpoints, case: str) -> None:
    assert _state_differences(real.made[0][case], real.directory / case) == []
    assert _state_differences(real.made[0][case], real.directory / case / "universal") == []
    assert _weight_differences(real.made[0][case], real.directory / case) == []


@pytest.mark.parametrize("case", [case for case in FURTHER if case[0] != "0"])
def test_so_they_are_in_other_formats(further: RealCheckpoints, case: str) -> None:
    assert _weight_differences(further.made[0][case], further.directory / case) == []
    if case.endswith(("elastic_checkpoint", "round_robin_gradients")):
        # The same training. DeepSpeed's converter does not read the first, and swaps names in the second, where its
        # zero_to_fp32 does not.
        assert _state_differences(further.made[0]["2-fp32-parameter_alignment"], further.directory / case) == []
        return
    assert _state_differences(further.made[0][case], further.directory / case) == []
    assert _state_differences(further.made[0][case], further.directory / case / "universal") == []


def test_stages_of_a_pipeline_are_one_model(deepspeed_world: DeepSpeedWorld, tmp_path: Path) -> None:
    stages = deepspeed_world.run_theirs(make_pipeline, str(tmp_path), timeout_s=100)
    state = open_checkpoint(tmp_path)
    whole = {name: weight for stage in stages for name, weight in stage.items()}
    assert len(whole) == 6
    assert {f"model.{name}" for name in whole} == {name for name in state.tensors if name.startswith("model.")}
    for name, weight in whole.items():
        assert torch.equal(state.whole(f"model.{name}"), weight)
        assert state.tensors[f"optimizer.state.{name}.exp_avg"].shape == tuple(weight.shape)


def test_facts_of_the_run_come_along(real: RealCheckpoints) -> None:
    facts = open_checkpoint(real.directory / "2-fp32", f"global_step{NUM_STEPS}").facts
    assert (facts.stage, facts.num_data_ranks, facts.global_steps) == (2, 2, NUM_STEPS)
    assert facts.client_state["epoch"] == 4
    assert facts.client_state["args"].get("layers") == 2
    assert facts.config["gradient_clipping"] == 0.5


def _engine(sections: dict[str, dict[str, object]], dtype: str = "fp32") -> Engine:
    model = OddModel()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # what is right afterwards was loaded
    plan = Plan.from_dict({**sections, "training": {"gradient_clipping": 0.5}, "precision": {"dtype": dtype}})
    return parallelize(model, AdamW(groups_of(model), lr=1.0), plan, loss_fn=loss_of)


def _trained_on(engine: Engine) -> list[float]:
    """The mean losses of the steps that follow."""
    return [engine.step(batch_of(dist.get_rank(), step)) for step in range(NUM_STEPS, NUM_STEPS + NUM_FURTHER)]


def _as_deepspeed(real: RealCheckpoints, case: str) -> Any:
    """The mean of the ranks' losses, had DeepSpeed trained on."""
    by_step = zip(*(made[case].losses for made in real.made), strict=True)
    return pytest.approx([sum(losses) / len(losses) for losses in by_step], abs=1e-5)


def _go_on(directory: str, plans: dict[str, dict[str, dict[str, object]]]) -> dict[str, list[float]]:
    losses = {}
    for case in ("0-fp32", "2-fp32", "3-fp32"):
        for plan, sections in plans.items():
            engine = _engine(sections)
            facts = load_deepspeed(engine, Path(directory) / case)
            assert (facts.global_steps, engine.num_steps) == (NUM_STEPS, NUM_STEPS)
            losses[f"{case} into {plan}"] = _trained_on(engine)
    return losses


def test_training_goes_on_under_any_plan_as_it_would_have_with_deepspeed(world: World, real: RealCheckpoints) -> None:
    results = world.run(_go_on, str(real.directory), PLANS, num_ranks=2, timeout_s=120)
    for label, found in results[0].items():
        assert found == _as_deepspeed(real, label.partition(" ")[0]), label


def _load_converted(directory: str) -> list[float]:
    engine = _engine({"mesh": {"dp": 1, "shard": -1}})
    engine.load(directory)
    assert engine.num_steps == NUM_STEPS
    return _trained_on(engine)


def command(*words: object) -> str:
    """`torsh migrate checkpoint …`, to the end."""
    result = CliRunner().invoke(app, ["migrate", "checkpoint", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_makes_a_checkpoint_of_ours(world: World, real: RealCheckpoints, tmp_path: Path) -> None:
    output = command(real.directory / "3-fp32", tmp_path / "ours", "--tag", f"global_step{NUM_STEPS}")
    assert "wrote" in output
    results = world.run(_load_converted, str(tmp_path / "ours"), num_ranks=2, timeout_s=60)
    assert results[0] == _as_deepspeed(real, "3-fp32")


def test_a_stage_without_shards_gives_its_fp32_copies(further: RealCheckpoints) -> None:
    state = open_checkpoint(further.directory / "0-bf16")
    weight = state.whole("model.middle.weight")
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())
    assert state.whole("optimizer.state.middle.weight.exp_avg").shape == (5, 7)


def test_the_loss_scale_comes_along(further: RealCheckpoints) -> None:
    state = open_checkpoint(further.directory / "2-fp16")
    assert state.values["engine"]["precision"]["scale"] == state.facts.loss_scaler["cur_scale"] > 1


@pytest.mark.parametrize(("file_format", "dtype"), [("safetensors", "fp32"), ("bin", "fp32"), ("bin", "bf16")])
def test_weights_are_written_as_zero_to_fp32_does(
    real: RealCheckpoints, tmp_path: Path, file_format: str, dtype: str
) -> None:
    output = command(real.directory / "1-bf16", tmp_path / "out", "--weights", file_format, "--dtype", dtype)
    paths = [Path(line.removeprefix("wrote ")) for line in output.splitlines()]
    if file_format == "bin":
        found = torch.load(paths[0], weights_only=True)
    else:
        from safetensors.torch import load_file

        found = load_file(paths[0])
    model = OddModel()
    model.load_state_dict(found)
    expected = real.made[0]["1-bf16"].weights["middle.weight"]
    torch.testing.assert_close(
        found["middle.weight"].float(), expected if dtype == "fp32" else expected.bfloat16().float()
    )
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        write_weights(real.directory / "1-bf16", tmp_path / "out")


# --- what is missing or does not fit -------------------------------------------------------------------------------


@pytest.fixture
def copy(real: RealCheckpoints, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    target = tmp_path / "copy"
    shutil.copytree(real.directory / request.param, target)
    return target


@pytest.mark.parametrize("copy", ["2-fp32", "3-fp32"], indirect=True)
def test_a_missing_shard_is_named(copy: Path) -> None:
    next(copy.glob("*/*rank_0_mp_rank_00_optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match=r"lacks the optimizer shard of data-parallel rank 0"):
        open_checkpoint(copy)


@pytest.mark.parametrize("copy", ["2-fp32", "3-fp32"], indirect=True)
def test_shards_of_another_world_size_are_refused(copy: Path) -> None:
    shard = next(copy.glob("*/*rank_1_mp_rank_00_optim_states.pt"))
    shard.unlink()
    with pytest.raises(CheckpointError, match="saved by 2 data-parallel ranks, but has 1 optimizer shards"):
        open_checkpoint(copy)


@pytest.mark.parametrize("copy", ["1-bf16"], indirect=True)
def test_a_damaged_file_and_a_wrong_tag_are_named(copy: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tag global_step9"):
        open_checkpoint(copy, "global_step9")
    shard = next(copy.glob("*/*rank_1_mp_rank_00_optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is damaged"):
        open_checkpoint(copy)
    (copy / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match="names 'gone', which is not there"):
        open_checkpoint(copy)


def _load_wrongly(directory: str) -> tuple[str, torch.Tensor]:
    model = OddModel()
    plan = Plan.from_dict({"mesh": {"dp": 1}})
    engine = parallelize(model, AdamW(model.parameters(), lr=0.1), plan, loss_fn=loss_of)
    try:
        load_deepspeed(engine, Path(directory))
    except CheckpointError as error:
        text = error.message
    load_deepspeed(engine, Path(directory), model_only=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    other = parallelize(model, AdamW(trained, lr=0.1), plan, loss_fn=loss_of)
    load_deepspeed(other, Path(directory))
    held = other.optimizer.state[model.middle.weight]
    assert (other.optimizer.param_groups[0]["lr"], float(held["step"])) == (0.1, NUM_STEPS)
    return text, model.middle.weight.detach()


def test_another_optimizer_is_refused_and_the_model_alone_loads(world: World, real: RealCheckpoints) -> None:
    ((text, weight),) = world.run(_load_wrongly, str(real.directory / "2-fp32"), num_ranks=1)
    assert "an optimizer with other parameters or groups" in text
    assert torch.equal(weight, real.made[0]["2-fp32"].weights["middle.weight"])


def test_a_checkpoint_of_ours_is_not_taken_for_a_damaged_one_of_theirs(tmp_path: Path) -> None:
    tag = tmp_path / "global_step6"
    tag.mkdir()
    (tmp_path / "latest").write_text(tag.name)
    with pytest.raises(CheckpointError, match="is not a checkpoint of DeepSpeed"):
        find_files(tmp_path)
    (tag / "step-00000006").mkdir()
    with pytest.raises(CheckpointError, match="a checkpoint of this library already") as caught:
        find_files(tmp_path)
    assert "torsh checkpoint export" in str(caught.value.hint)
