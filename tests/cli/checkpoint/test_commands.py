"""`torsh checkpoint`: what people see of checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from torsh_distributed.checkpoint import CheckpointManager
from torsh_distributed.checkpoint.files.checkpoint_directory import REQUEST
from torsh_distributed.checkpoint.files.manifest import data_file
from torsh_distributed.cli.checkpoint.commands import app
from torsh_distributed.errors import CheckpointError
from torsh_distributed.plan import CheckpointConfig


def torsh(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=True)
    if isinstance(done.exception, CheckpointError):
        raise done.exception
    return done.exit_code, done.output


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with CheckpointManager(CheckpointConfig(dir=str(tmp_path / "c"), keep=9)) as manager:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
            manager.save(step, {"model": model}, loss=loss)
            with torch.no_grad():
                model[1].bias.add_(1.0)
    return tmp_path / "c"


def test_ls_show_and_verify_say_what_there_is(saved: Path) -> None:
    _, text = torsh("ls", saved)
    assert all(part in text for part in ("0.5000", "0.2500", "asked"))
    _, text = torsh("show", saved, "--step", 2)
    assert "model.0.weight" in text
    assert "3×4" in text
    code, text = torsh("verify", saved, "--all")
    assert (code, text.count("is whole")) == (0, 3)
    path = saved / "step-00000003" / data_file(0)
    path.write_bytes(path.read_bytes()[:-1])
    code, text = torsh("verify", saved, "--all")
    assert code == 1
    assert "step-00000003 is damaged: __0_0.distcp, bytes" in text
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        torsh("ls", saved.parent / "none")


def test_diff_names_the_tensors_that_differ(saved: Path) -> None:
    code, text = torsh("diff", saved / "step-00000001", saved / "step-00000002")
    assert code == 1
    assert "model.1.bias" in text
    assert "2 of 2 elements differ" in text
    assert "3 tensors are equal, 1 differ" in text
    assert torsh("diff", saved, saved)[0] == 0


def test_prune_keeps_the_best_and_nothing_goes_if_the_newest_is_damaged(saved: Path) -> None:
    assert "would remove step-00000001" in torsh("prune", saved, "--keep", 1, "--dry-run")[1]
    path = saved / "step-00000003" / data_file(0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(CheckpointError, match="step-00000003 is damaged"):
        torsh("prune", saved, "--keep", 1)
    path.write_bytes(whole)
    assert "removed step-00000001\n2 of 3" in torsh("prune", saved, "--keep", 1)[1]
    assert sorted(path.name for path in saved.glob("step-*")) == ["step-00000002", "step-00000003"]


def test_now_asks_the_job_that_writes(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="no job writes checkpoints to"):
        torsh("now", saved)
    state = {"x": torch.zeros(1)}
    with CheckpointManager(CheckpointConfig(dir=str(saved), every_steps=1000)) as manager:
        manager.save(4, state)
        assert torsh("now", saved)[0] == 0
        assert manager.after_step(5, state)
        manager.wait()
        assert not (saved / REQUEST).exists()
        assert manager.list()[0].reason == "request"


def test_safetensors_go_out_and_come_in(saved: Path, tmp_path: Path) -> None:
    assert "wrote 1 files" in torsh("export", saved, tmp_path / "out")[1]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert sorted(found) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    with pytest.raises(CheckpointError, match="is not empty"):
        torsh("export", saved, tmp_path / "out")
    torsh("import", tmp_path / "out", tmp_path / "in")
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with CheckpointManager(tmp_path / "in") as manager:
        manager.load({"model": model})
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in found.items()
    }
    save_file({"x": torch.ones(3)}, tmp_path / "bad.safetensors")
    (tmp_path / "bad.safetensors").write_bytes((tmp_path / "bad.safetensors").read_bytes()[:-2])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        torsh("import", tmp_path / "bad.safetensors", tmp_path / "in2")


def test_a_damaged_checkpoint_is_neither_exported_nor_compared(saved: Path, tmp_path: Path) -> None:
    path = saved / "step-00000003" / data_file(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for args in (("export", saved, tmp_path / "out"), ("diff", saved / "step-00000002", saved / "step-00000003")):
        with pytest.raises(CheckpointError, match=r"step-00000003 is damaged: __0_0\.distcp, bytes 0 to"):
            torsh(*args)
    assert not (tmp_path / "out").exists()
    assert torsh("export", saved, tmp_path / "out", "--step", 2)[0] == 0


def test_prune_leaves_what_it_cannot_read(saved: Path) -> None:
    (saved / "step-00000001" / "manifest.json").write_text("{}")
    code, text = torsh("prune", saved, "--keep", 1, "--keep-best", 0)
    assert code == 0
    assert "not counted, and left as it is: step-00000001 is damaged: manifest.json" in text
    assert "removed step-00000002\n1 of 2 checkpoints stay" in text
    assert (saved / "step-00000001").exists()


@pytest.mark.ranks
def test_looking_needs_no_torch(saved: Path) -> None:
    program = f"""
import sys
from torsh_distributed.cli.checkpoint.commands import app
app(["verify", {str(saved)!r}], standalone_mode=False)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
