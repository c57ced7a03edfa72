"""fp8 training: which layers, the numbers of rounded products, shards as one process, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.bed.heavy_imports import TORCHAO, TRANSFORMERS
from tests.bed.world import World
from tests.parallel.models.zoo import SPECIMENS, text_batch
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


def test_narrow_layers_are_told_that_it_hardly_pays(caplog: pytest.LogCaptureFixture) -> None:
    narrow, wide = nn.Sequential(nn.Linear(1024, 3072)), nn.Sequential(nn.Linear(2048, 6144), nn.Linear(2048, 64))
    use_float8(wide, EMULATED, CPU)
    assert caplog.messages == []
    use_float8(narrow, EMULATED, CPU)
    assert "fp8 hardly pays here" in caplog.text


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def text() -> torch.Tensor:
    return torch.randint(32, (8, 17), generator=torch.Generator().manual_seed(1))


def losses_alone(recipe: str | None) -> list[float]:
    """Of plain torch in one process: in fp8, or in bf16 without a recipe."""
    model = gpt()
    if recipe is not None:
        use_float8(model, PrecisionConfig(dtype="fp8", fp8_emulate=True, fp8_recipe=recipe), CPU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(text()[:, :-1])
        loss = next_character_loss(logits.float(), text()[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return out


def losses_on(mesh: dict[str, int], recipe: str) -> list[float]:
    precision: dict[str, Any] = {"dtype": "fp8", "fp8_emulate": True, "fp8_recipe": recipe}
    sections: dict[str, Any] = {"precision": precision, "mesh": mesh}
    if "pp" in mesh:
        sections["pipeline"] = {"num_microbatches": 2}
    plan = Plan.from_dict(sections)
    model = gpt()
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), plan, loss_fn=next_character_loss)
    rank, rows = engine.strategy.data_rank, 8 // engine.strategy.data_degree
    part = text()[rank * rows : (rank + 1) * rows]
    return [engine.step((part[:, :-1], part[:, 1:])) for _ in range(6)]


def compare() -> None:
    plain = losses_alone(None)
    for recipe in RECIPES:
        found = losses_alone(recipe)
        assert found == pytest.approx(plain, rel=0.02), recipe
        assert found != plain, "products are rounded to fp8"
        assert found[-1] < found[0]
        for mesh in ({"dp": 2}, {"dp": 1, "shard": 2})[: 2 if recipe == "tensorwise" else 1]:
            assert losses_on(mesh, recipe) == pytest.approx(found, rel=0.01), (mesh, recipe)


@pytest.mark.matrix
def test_losses_stay_close_to_bf16_and_ranks_train_as_one_process(world: World) -> None:
    world.run(compare, imports=TORCHAO, timeout_s=110)


def in_stages() -> None:
    for recipe in RECIPES:
        assert losses_on({"dp": 1, "pp": 2}, recipe) == pytest.approx(losses_alone(recipe), rel=0.01), recipe


def with_experts() -> None:
    """A model of transformers whose experts are spread: they stay in bf16, the other layers are in fp8."""
    config = PrecisionConfig(dtype="fp8", fp8_emulate=True)
    batch = text_batch(torch.Generator().manual_seed(1))
    wanted, found = [], []
    torch.manual_seed(0)
    alone = SPECIMENS["Mixtral"].build()
    spread = copy.deepcopy(alone)
    use_float8(alone, config, CPU)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    engine = parallelize(
        spread, torch.optim.SGD(spread.parameters(), lr=0.1), Plan(mesh={"dp": 1, "ep": 2}, precision=config)
    )
    rows = slice(engine.strategy.data_rank, None, engine.strategy.data_degree)
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            loss = alone(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
        found.append(engine.step({name: value[rows] for name, value in batch.items()}))
    assert found == pytest.approx(wanted, rel=0.01)


@pytest.mark.matrix
@pytest.mark.needs_library("transformers")
def test_spread_experts_train_as_one_process(world: World) -> None:
    world.run(with_experts, imports=(*TORCHAO, *TRANSFORMERS), backend="torsh", timeout_s=110)


@pytest.mark.matrix
def test_stages_train_as_one_process(world: World) -> None:
    world.run(in_stages, imports=TORCHAO, timeout_s=110)
