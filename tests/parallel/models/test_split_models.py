"""Models of transformers on several axes at once, with other choices than the defaults; their state is the model's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.bed.heavy_imports import TRANSFORMERS
from tests.bed.world import World
from tests.parallel.models.model_matrix import all_alone, plan_of, train_on
from tests.parallel.models.test_bad_models import Doubles, Dynamic, remote_model
from tests.parallel.models.zoo import BATCH, SPECIMENS, quiet_imports, text_batch
from tests.parallel.tiny_transformers import tiny
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import ExpertConfig, MeshConfig, Plan, TensorConfig
from torsh_distributed.train import parallelize

pytestmark = pytest.mark.needs_library("transformers")

LOSS = TensorConfig(loss_parallel=True)
SEQUENCE = TensorConfig(sequence_parallel=True)
BOTH = TensorConfig(loss_parallel=True, sequence_parallel=True)


def train_plans(cases: list[tuple[str, Plan]]) -> list[str]:
    expected = all_alone(list(dict.fromkeys(name for name, _ in cases)))
    return [train_on(name, plan).verdict(expected[name]) for name, plan in cases]


def check(world: World, cases: list[tuple[str, Plan]], num_ranks: int) -> None:
    for verdicts in world.run(
        train_plans, cases, num_ranks=num_ranks, backend="torsh", timeout_s=120, imports=TRANSFORMERS
    ):
        assert verdicts == ["equal"] * len(cases)


@pytest.mark.matrix
def test_axes_combine(world: World) -> None:
    meshes = [
        MeshConfig(dp=2, tp=2),
        MeshConfig(dp=1, shard=2, tp=2),
        MeshConfig(dp=1, ep=2, tp=2),
        MeshConfig(dp=2, ep=2),
        MeshConfig(dp=1, shard=2, ep=2),
    ]
    cases = [("Mixtral", plan_of(mesh)) for mesh in meshes]
    cases += [("Qwen3", plan_of(mesh)) for mesh in meshes[:2]]
    cases += [("GPT-2", plan_of(MeshConfig(dp=2, tp=2), tensor=BOTH)), ("Qwen3", plan_of(meshes[0], tensor=SEQUENCE))]
    check(world, cases, 4)


def one_step(name: str, plan: Plan) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = SPECIMENS[name].build()
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    rank, degree = engine.strategy.data_rank, engine.strategy.data_degree
    batch = text_batch(torch.Generator().manual_seed(11))
    engine.step({key: value[rank * BATCH // degree : (rank + 1) * BATCH // degree] for key, value in batch.items()})
    whole: dict[str, Tensor] = engine.strategy.whole_state(engine.optimizer)["model"]
    engine.strategy.load_whole_state(engine.optimizer, engine.strategy.whole_state(engine.optimizer))
    return whole


def compare_states() -> None:
    """What is saved under an axis is what one process would save, name by name."""
    for name, mesh in [
        ("Gemma2", MeshConfig(dp=1, tp=2)),
        ("Mixtral", MeshConfig(dp=1, tp=2)),
        ("Mixtral", MeshConfig(dp=1, ep=2)),
    ]:
        torch.manual_seed(5)
        model = SPECIMENS[name].build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**text_batch(torch.Generator().manual_seed(11))).loss.backward()
        optimizer.step()
        found = one_step(name, plan_of(mesh))
        assert found.keys() == model.state_dict().keys()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=f"{name} {mesh} {key}")


def drop() -> None:
    """Whole activations drop the same elements on all ranks: losses agree, and parameters stay equal."""
    with quiet_imports():
        from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(torch.distributed.get_rank())  # ranks need not agree before
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=64, **sizes, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    model = BertForSequenceClassification(config)
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_of(MeshConfig(dp=1, tp=2)))
    ids = torch.arange(BATCH * 4).view(BATCH, 4)
    for _ in range(3):
        engine.step({"input_ids": ids, "labels": torch.zeros(BATCH, dtype=torch.long)})
    for name in ("bert.embeddings.LayerNorm.weight", "bert.encoder.layer.1.output.dense.bias", "classifier.weight"):
        mine = model.get_parameter(name).detach()
        everyone = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(everyone, mine)
        torch.testing.assert_close(everyone[0], everyone[1], rtol=0, atol=0)


def refuse() -> None:
    """Named before anything is changed, on every rank."""
    with pytest.raises(ConfigurationError, match=r"do not spread evenly over mesh\.ep 2"):
        model = SPECIMENS["Mixtral"].build()
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.data = layer.mlp.experts.gate_up_proj.data[:3]
            layer.mlp.experts.down_proj.data = layer.mlp.experts.down_proj.data[:3]
        parallelize(model, torch.optim.SGD(model.parameters()), plan_of(MeshConfig(dp=1, ep=2)))
    with pytest.raises(ConfigurationError, match=r"expert\.overflow is for layers of this library"):
        model = SPECIMENS["Mixtral"].build()
        plan = plan_of(MeshConfig(dp=1, ep=2), expert=ExpertConfig(overflow="none"))
        parallelize(model, torch.optim.SGD(model.parameters()), plan)
    with pytest.raises(ConfigurationError, match=r"mesh.ep 2 is for models with experts"):
        model = SPECIMENS["Llama"].build()
        parallelize(model, torch.optim.SGD(model.parameters()), plan_of(MeshConfig(dp=1, ep=2)))
    with pytest.raises(ConfigurationError, match=r"tensor.sequence_parallel does not support this model"):
        model = SPECIMENS["Mixtral"].build()
        parallelize(model, torch.optim.SGD(model.parameters()), plan_of(MeshConfig(dp=1, tp=2), tensor=SEQUENCE))


def refuse_models() -> None:
    """Models that cannot be spread as asked are named on every rank, and stay as they are."""
    split, staged, cut = MeshConfig(dp=1, tp=2), MeshConfig(dp=1, pp=2), MeshConfig(dp=1, cp=2)
    bad: list[tuple[Callable[[], nn.Module], MeshConfig, str]] = [
        (Doubles, split, r"blocks\.0\.0: Doubled computes its forward by itself"),
        (lambda: tiny("llama", num_attention_heads=3, hidden_size=24, num_key_value_heads=3), split, "has 3 heads"),
        (Dynamic, staged, "could not be traced"),
        (lambda: tiny("t5"), staged, "is an encoder and a decoder"),
        (lambda: tiny("bloom"), cut, r"transformer\.h\.0 of BloomForCausalLM mixes positions in another way"),
        (remote_model, cut, r"blocks\.0 of RemoteForCausalLM mixes positions in another way"),
    ]
    for make, mesh, message in bad:
        model = make()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ConfigurationError, match=message) as caught:
            parallelize(model, torch.optim.SGD(model.parameters()), plan_of(mesh), loss_fn=nn.functional.mse_loss)
        assert caught.value.hint
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        torch.distributed.barrier()


def compare_losses() -> None:
    """Logits and sequences may stay split where the model computes its loss itself."""
    split = MeshConfig(dp=1, tp=2)
    cases = [("Llama", plan_of(split, tensor=BOTH)), ("Gemma2", plan_of(split, tensor=LOSS))]
    assert train_plans(cases) == ["equal", "equal"]


def look_at_all() -> None:
    """One world for all of it: each has to import transformers."""
    compare_losses()
    compare_states()
    drop()
    refuse()
    refuse_models()


def test_losses_state_dropout_and_refusals(world: World) -> None:
    world.run(look_at_all, num_ranks=2, backend="torsh", timeout_s=120, imports=TRANSFORMERS)
