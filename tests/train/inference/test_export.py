"""An export from any strategy is the whole model, in files that other libraries load."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bed.world import World
from tests.parallel.weights.checkpoints import gpt
from torsh_distributed.errors import IoError, ProcessFailure
from torsh_distributed.parallel.weights.tensor_files import stored_tensors
from torsh_distributed.plan import Plan
from torsh_distributed.train import parallelize
from torsh_distributed.train.demos.gpt import next_character_loss

SGD = functools.partial(torch.optim.SGD, lr=0.1)
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "shard": {"dp": 1, "shard": 2},
    "tp": {"dp": 1, "tp": 2},
    "pp": {"dp": 1, "pp": 2, "pipeline": {"num_microbatches": 2}},
}


def tied() -> nn.Module:
    model = gpt()
    model.head.weight = model.token.weight
    return model


def check_files(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Read by the format's own library."""
    from safetensors.torch import load_file

    files = sorted(file.name for file in folder.iterdir())
    assert len(files) > 2
    assert files[0].startswith("model-00001-of-")
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found = {key: value for file in set(where.values()) for key, value in load_file(folder / file).items()}
    assert found.keys() == wanted.keys() == where.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=f"{folder.name}: {key}")


def exported(folder: Path) -> str:
    wanted = tied().state_dict()
    del wanted["head.weight"]
    for name, plan in PLANS.items():
        engine = parallelize(tied(), SGD, Plan(**plan), loss_fn=next_character_loss)
        engine.export(folder / name, max_file_gb=8e-6)
        check_files(folder / name, wanted)
    engine.export(folder / "one", dtype="bf16")
    blocked = folder / "file"
    if dist.get_rank() == 0:
        blocked.write_text("")
    dist.barrier()
    with pytest.raises((IoError, ProcessFailure)) as caught:
        engine.export(blocked / "below")
    return str(caught.value)


@pytest.mark.needs_library("safetensors")
def test_every_axis_exports_the_whole_model(world: World, tmp_path: Path) -> None:
    for text in world.run(exported, tmp_path):
        assert "the export to" in text
    one = stored_tensors(tmp_path / "one")
    assert {value.dtype for value in one.values()} == {torch.bfloat16}
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["model.safetensors"]
