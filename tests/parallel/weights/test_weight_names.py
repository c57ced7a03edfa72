"""Stored names lead to the model's tensors; what does not fit is listed all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parallel.models.zoo import SPECIMENS
from tests.parallel.weights.checkpoints import gpt, write_file
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.weights import weight_names
from torsh_distributed.parallel.weights.safetensors_format import FileTensor
from torsh_distributed.parallel.weights.stacked_tensor import StackedTensor
from torsh_distributed.parallel.weights.tensor_files import stored_tensors
from torsh_distributed.parallel.weights.weight_names import converted, match_names


def stored(model: nn.Module, rename=lambda name: name) -> dict[str, FileTensor]:
    return {
        rename(name): FileTensor(Path(name), value.dtype, tuple(value.shape), 0)
        for name, value in model.state_dict().items()
    }


class Headed(nn.Module):
    """A base model under a prefix, and a head that shares its first weight."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.model.register_buffer("table", torch.ones(3), persistent=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.model[0].weight


def test_names_match_with_the_base_models_prefix_more_or_less() -> None:
    model = Headed()
    base = Headed().model
    base.base_model_prefix = "model"
    found = match_names(model, stored(model.model), where="x")
    assert found["model.0.weight"].file == Path("0.weight")
    assert found["head.weight"] is found["model.0.weight"], "shared: one of its names is enough"
    with_head = {**stored(model), "head.extra": FileTensor(Path("e"), torch.float32, (1,), 0)}
    assert match_names(base, with_head, where="x")["1.bias"].file == Path("model.1.bias")
    old = {**stored(model), "model.table": FileTensor(Path("t"), torch.float32, (3,), 0)}
    assert "model.table" not in match_names(model, old, where="x"), "computed, so what a file has of it is left"


def test_every_difference_is_listed_with_the_nearest_name() -> None:
    model = gpt()
    given = stored(model, lambda name: name.replace("projection", "proj"))
    given["head.weight"] = FileTensor(Path("h"), torch.float32, (30, 16), 0)
    given["norm.weight"] = FileTensor(Path("n"), torch.int64, (16,), 0)
    del given["position.weight"]
    with pytest.raises(InvalidArgument) as caught:
        match_names(model, given, where="folder")
    text = str(caught.value)
    assert "the weights in folder do not fit the model" in text
    assert "blocks.*.projection.weight × 4 (near: blocks.0.proj.weight)" in text
    assert "blocks.*.proj.bias × 4 (near: blocks.0.projection.bias)" in text
    assert "position.weight" in text
    assert "head.weight is 29 × 16 float32 in the model, 30 × 16 float32 in the file" in text
    assert "norm.weight is 16 float32 in the model, 16 int64 in the file" in text
    assert caught.value.context == {"missing": 9, "unknown": 8, "misfits": 2}


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
    monkeypatch.setattr(weight_names, "_transforms", lambda _: pytest.fail("asking transformers takes long"))
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
