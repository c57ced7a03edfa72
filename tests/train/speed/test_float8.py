"""fp8 training: which layers, the numbers of rounded products, shards as one process, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.world import World
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable
from torsh_distributed.plan import Plan, PrecisionConfig
from torsh_distributed.train import parallelize
from torsh_distributed.train.demos.gpt import CharGPT, next_character_loss
from torsh_distributed.train.speed.float8 import use_float8

pytestmark = [
    pytest.mark.needs_library("torchao"),
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),  # in torchao's own texts
]
CPU = torch.device("cpu")
EMULATED = PrecisionConfig(dtype="fp8", fp8_emulate=True)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return CharGPT(32, width=32, num_layers=2, num_heads=2)


def names_of(config: PrecisionConfig) -> list[str]:
    return use_float8(gpt(), config, CPU)


def test_all_linear_layers_but_the_head_are_converted_and_keep_their_parameters() -> None:
    model = gpt()
    before = {name: id(param) for name, param in model.named_parameters()}
    names = use_float8(model, EMULATED, CPU)
    assert "head" not in names
    assert len(names) == 8
    assert {type(model.get_submodule(name)).__name__ for name in names} == {"Float8Linear"}
    assert {name: id(param) for name, param in model.named_parameters()} == before
    skipping = names_of(EMULATED.replace(fp8_skip=("blocks.*.projection",)))
    assert set(names) - set(skipping) == {"blocks.0.projection", "blocks.1.projection"}


def test_what_cannot_be_computed_in_fp8_is_refused() -> None:
    with pytest.raises(FeatureNotAvailable, match="this is cpu"):
        use_float8(gpt(), PrecisionConfig(dtype="fp8"), CPU)
    with pytest.raises(ConfigurationError, match="no linear layer"):
        use_float8(nn.Sequential(nn.Linear(9, 9)), EMULATED, CPU)
    with pytest.raises(ConfigurationError, match="fp8_skip"):
        names_of(EMULATED.replace(fp8_skip=("blocks.*.wrong",)))


def losses(dtype: str, recipe: str = "tensorwise", shard: int = 1) -> list[float]:
    precision: dict[str, Any] = {"dtype": dtype}
    if dtype == "fp8":
        precision |= {"fp8_emulate": True, "fp8_recipe": recipe}
    plan = Plan.from_dict({"precision": precision, "mesh": {"dp": 1, "shard": shard}})
    model = gpt()
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), plan, loss_fn=next_character_loss)
    ids = torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(1))
    rank, rows = engine.strategy.data_rank, 8 // shard
    part = ids[rank * rows : (rank + 1) * rows]
    return [engine.step((part[:, :-1], part[:, 1:])) for _ in range(6)]


def losses_of_one_rank() -> dict[str, list[float]]:
    recipes = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    return {"bf16": losses("bf16"), **{recipe: losses("fp8", recipe) for recipe in recipes}}


def losses_of_shards() -> list[list[float]]:
    return [losses("fp8", recipe, shard=2) for recipe in ("tensorwise", "rowwise")]


def test_losses_stay_close_to_bf16_and_shards_train_as_one_rank(world: World) -> None:
    found = world.run(losses_of_one_rank, num_ranks=1)[0]
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        assert found[recipe] == pytest.approx(found["bf16"], rel=0.02), recipe
        assert found[recipe] != found["bf16"], "products are rounded to fp8"
        assert found[recipe][-1] < found[recipe][0]
    for sharded in world.run(losses_of_shards, num_ranks=2):
        assert sharded[0] == pytest.approx(found["tensorwise"], rel=0.01)
        assert sharded[1] == pytest.approx(found["rowwise"], rel=0.01)
