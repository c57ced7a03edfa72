"""`torsh migrate`: a config becomes a plan with a table, a checkpoint becomes our checkpoint, scripts are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from torsh_distributed.cli.app import app
from torsh_distributed.errors import ConfigurationError, InvalidArgument, IoError, TorshError
from torsh_distributed.plan import Plan

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(*words: object, columns: int = 160) -> str:
    result = CliRunner().invoke(app, ["migrate", *map(str, words)], env={"COLUMNS": str(columns)})
    if isinstance(result.exception, TorshError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_file_becomes_a_plan_and_a_table(config: Path, tmp_path: Path) -> None:
    output = run(config, "-o", tmp_path / "plan.toml", "--world", 4, "--fill", "gradient_accumulation_steps=3")
    plan = Plan.load(tmp_path / "plan.toml")
    assert plan.training.batch_size == 2 * 3 * 4
    assert plan.fsdp.strategy == "shard_grad_op"
    (row,) = [line for line in output.splitlines() if "zero_optimization.overlap_comm" in line]
    assert "│ hint" in row


def test_a_narrow_terminal_gets_a_line_for_each_key(config: Path) -> None:
    output = run(config, "--world", 4, "--fill", "gradient_accumulation_steps=3", columns=80)
    assert "  honoured   zero_optimization.stage = 2 → fsdp.strategy = shard_grad_op\n" in output


def test_options_may_come_first_and_the_kind_may_be_named(config: Path) -> None:
    run("--from", "deepspeed", config, "--world", 4, "--fill", "gradient_accumulation_steps=1")
    with pytest.raises(ConfigurationError, match="did you mean deepspeed"):
        run("--from", "deepsped", config)


def test_a_refused_key_writes_no_plan_unless_it_is_left_out(tmp_path: Path) -> None:
    path, plan = tmp_path / "ds.json", tmp_path / "plan.toml"
    path.write_text('{"train_batch_size": 4, "sparse_attention": {"mode": "fixed"}}')
    with pytest.raises(ConfigurationError, match="sparse_attention"):
        run(path, "-o", plan)
    assert not plan.exists()
    run(path, "-o", plan, "--without-refused")
    assert plan.exists()


def test_what_is_no_config_is_said_to_be_none(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"name": "x"}')
    with pytest.raises(ConfigurationError, match="does not look like a config"):
        run(path)
    with pytest.raises(IoError, match="there is no file"):
        run(tmp_path / "absent.json")


def test_a_fill_without_a_value_is_refused(config: Path) -> None:
    with pytest.raises(TorshError, match="has no value"):
        run(config, "--fill", "gradient_accumulation_steps")


def test_check_still_looks_at_scripts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    assert "td.init()" in run("check", script)


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TorshError, match=r"no \*_model_states\.pt"):
        run("checkpoint", tmp_path, tmp_path / "out")
    with pytest.raises(TorshError, match="is not a format"):
        run("checkpoint", tmp_path, tmp_path / "out", "--weights", "gguf")


def test_a_checkpoint_that_is_not_there_is_said_to_be_missing_and_not_of_one_library(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no file or directory .*none\.pt"):
        run("checkpoint", tmp_path / "none.pt", tmp_path / "out")


def test_a_checkpoint_of_torch_becomes_one_of_ours_or_weights(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    named = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": named, "optimizer": optimizer.state_dict(), "epoch": 2}, tmp_path / "ddp.pt")
    output = run("checkpoint", tmp_path / "ddp.pt", tmp_path / "ours")
    assert "wrote" in output
    assert any((tmp_path / "ours").iterdir())
    run("checkpoint", tmp_path / "ddp.pt", tmp_path / "weights", "--weights", "bin", "--dtype", "bf16")
    found = torch.load(tmp_path / "weights" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(found["weight"], model.weight.detach().bfloat16())
    with pytest.raises(TorshError, match="have no tags"):
        run("checkpoint", tmp_path / "ddp.pt", tmp_path / "out", "--tag", "x")
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    with pytest.raises(TorshError, match="has no optimizer state"):
        run("checkpoint", tmp_path / "bare.pt", tmp_path / "out")
