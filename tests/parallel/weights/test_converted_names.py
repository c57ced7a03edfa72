"""Names and forms of older checkpoints become those of the model, as transformers declares it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parallel.models.zoo import SPECIMENS
from tests.parallel.weights.checkpoints import write_file
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.weights import converted_names
from torsh_distributed.parallel.weights.converted_names import converted
from torsh_distributed.parallel.weights.safetensors_format import FileTensor
from torsh_distributed.parallel.weights.stacked_tensor import StackedTensor
from torsh_distributed.parallel.weights.weight_files import stored_tensors

pytestmark = pytest.mark.needs_library("transformers")

LAYER = "model.layers.0.block_sparse_moe.experts"


def model() -> nn.Module:
    with torch.device("meta"):
        return SPECIMENS["Mixtral"].build()


def files(path: Path, **changes: torch.Tensor) -> dict[str, FileTensor]:
    """One layer's experts as hubs have them, two of them with numbers that sort differently as text."""
    state = {
        f"{LAYER}.{number}.{part}.weight": torch.full(shape, float(number))
        for number in range(12)
        for part, shape in (("w1", (48, 32)), ("w3", (48, 32)), ("w2", (32, 48)))
    }
    write_file(path, {**state, "model.norm.weight": torch.ones(32), **changes})
    return stored_tensors(path)


def test_experts_are_stacked_in_their_order_under_the_name_of_the_model(tmp_path: Path) -> None:
    found = converted(model(), files(tmp_path / "a.safetensors"))
    assert set(found) == {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "model.norm.weight",
    }
    stack = found["model.layers.0.mlp.experts.gate_up_proj"]
    assert isinstance(stack, StackedTensor)
    assert stack.shape == (12, 96, 32)
    starts = [part.start for expert in stack.experts for part in expert[:1]]
    assert starts == sorted(starts), "expert 10 comes after expert 9"


def test_what_is_stored_as_the_model_has_it_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted_names, "_transforms", lambda _: pytest.fail("asking transformers takes long"))
    write_file(tmp_path / "a.safetensors", {"model.layers.0.mlp.experts.down_proj": torch.ones(4, 32, 48)})
    stored = stored_tensors(tmp_path / "a.safetensors")
    assert converted(model(), stored) == stored
    monkeypatch.undo()
    assert converted(nn.Linear(2, 2), stored) == stored


def test_experts_that_are_not_all_there_are_refused(tmp_path: Path) -> None:
    stored = files(tmp_path / "a.safetensors")
    del stored[f"{LAYER}.3.w3.weight"]
    with pytest.raises(InvalidArgument, match=r"experts\.gate_up_proj is not stored as it is(?s:.)*from_pretrained"):
        converted(model(), stored)
