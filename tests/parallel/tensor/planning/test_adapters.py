"""Layers under an adapter: what is split of them, and which adapters are refused."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.tensor import find_tensor_plan
from torsh_distributed.plan import TensorConfig


class Adapter(nn.Module):
    """A layer with a low-rank one beside it, under the names that PEFT gives them."""

    def __init__(self, base: nn.Linear, *, dropout: float = 0.0, scaled: bool = False) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout)})
        if scaled:
            self.lora_magnitude = nn.ParameterDict({"default": base.weight.detach().norm(dim=1)})

    def forward(self, x: Tensor) -> Tensor:
        down = self.lora_A["default"](self.lora_dropout["default"](x))
        out: Tensor = self.base_layer(x) + self.lora_B["default"](down)
        return out


class Block(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.up = Adapter(nn.Linear(8, 16), **options)  # type: ignore[arg-type]  # of Adapter
        self.down = Adapter(nn.Linear(16, 8), **options)  # type: ignore[arg-type]  # of Adapter


class Net(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def torsh_anatomy(self) -> dict[str, object]:
        return {"tensor_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}


def test_the_parts_of_an_adapter_are_split_so_that_their_sum_fits() -> None:
    plan = find_tensor_plan(Net(), tp=2)
    styles = {row.name.removeprefix("blocks.0."): row.style.value for row in plan.modules if ".0." in row.name}
    assert styles == {
        "up.base_layer": "column_local",
        "up.lora_A.default": "replicated",
        "up.lora_B.default": "column_local",
        "down.base_layer": "row",
        "down.lora_A.default": "row",
        "down.lora_B.default": "replicated",
    }


def test_what_is_not_known_of_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"blocks\.0\.up: the adapter has dropout 0\.1(?s:.)*lora_dropout = 0"):
        find_tensor_plan(Net(dropout=0.1), tp=2)
    with pytest.raises(ConfigurationError, match=r"the adapter \(Adapter\) has lora_magnitude\.default"):
        find_tensor_plan(Net(scaled=True), tp=2)
    with pytest.raises(ConfigurationError, match="sequence_parallel does not support adapters"):
        find_tensor_plan(Net(), tp=2, config=TensorConfig(sequence_parallel=True))
