"""`parallelize` with experts: the plan's way through the Engine, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from tests.parallel.expert.test_strategy import batches, build, one_process
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.expert.layer import auxiliary_loss
from torsh_distributed.parallel.expert.strategy import ExpertDataParallel
from torsh_distributed.plan import Plan
from torsh_distributed.plan.expert import ExpertParallelismConfig
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.demos import gpt

CONFIG = ExpertParallelismConfig(num_experts=4, overflow="none")


def engine_for(mesh: dict[str, int], config: ExpertParallelismConfig = CONFIG, **sections: Any) -> Engine:
    model, optimizer = build(CONFIG)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return gpt.next_character_loss(logits, targets) + auxiliary_loss(model)

    training = {"steps": 6, "gradient_clipping": 0.5}
    plan = Plan(mesh=mesh, expert=config, training=training, **sections)  # type: ignore[arg-type]
    return parallelize(model, optimizer, plan, loss_fn=loss_fn)


def loader() -> DataLoader[Any]:
    inputs, targets = (torch.cat(halves) for halves in zip(*batches(), strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size=8)


def train_by_plan(meshes: list[dict[str, int]]) -> list[list[float]]:
    found = []
    for mesh in meshes:
        engine = engine_for(mesh)
        assert isinstance(engine.strategy, ExpertDataParallel) == ("shard" not in mesh)
        found.append([engine.step(batch) for batch in engine.batches(loader())])
        # Batches of 2 over 4 ranks: those without a share still take part in forward.
        ragged = DataLoader(TensorDataset(*(column[:5] for column in loader().dataset.tensors)), batch_size=2)
        assert engine.evaluate(ragged) > 0
    return found


def test_the_engine_reaches_the_losses_of_one_process(world: World) -> None:
    expected, _ = one_process(CONFIG, 6)
    meshes = [{"ep": 4}, {"ep": 2, "dp": 2}, {"dp": 4}, {"shard": 4}]
    for by_mesh in world.run(train_by_plan, meshes, num_ranks=4, backend="shm", timeout_s=60):
        for mesh, losses in zip(meshes, by_mesh, strict=True):
            assert losses == pytest.approx(expected, abs=1e-4), mesh


def train_otherwise(sections: list[dict[str, Any]]) -> list[tuple[list[float], int]]:
    """Losses, and how often a layer routed."""
    found = []
    for section in sections:
        engine = engine_for({"ep": 2}, **section)
        seen: list[events.Event] = []
        end = events.subscribe(seen.append, events.RoutingEvent)
        found.append(([engine.step(batch) for batch in engine.batches(loader())], len(seen)))
        end()
    return found


def test_recomputed_activations_and_low_precision_go_with_spread_experts(world: World) -> None:
    """A layer that is computed again in backward sends its tokens again, on every rank in the same order."""
    expected, _ = one_process(CONFIG, 6)
    sections: list[dict[str, Any]] = [
        {"activation": {"strategy": "uniform", "every_n_layers": 1}},
        {"precision": {"dtype": "bf16"}},
    ]
    for (recomputed, num_again), (low, num_once) in world.run(train_otherwise, sections, backend="shm", timeout_s=60):
        assert recomputed == pytest.approx(expected, abs=1e-4)
        assert low == pytest.approx(expected, abs=0.03)
        assert low != pytest.approx(expected, abs=1e-6), "bf16 had no effect"
        assert num_again == 2 * num_once, "nothing was recomputed"


def refusals() -> list[str]:
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    found = []
    for attempt in (
        lambda: parallelize(plain, optimizer, Plan(ep=2)),
        lambda: parallelize(plain, optimizer, Plan(expert=ExpertParallelismConfig(router_jitter=0.1))),
        lambda: engine_for({"ep": 2}, CONFIG.replace(capacity_factor=2.0)),
        lambda: engine_for({"ep": 1, "shard": 2}, fsdp={"strategy": "shard_optimizer"}),
        lambda: engine_for({"ep": 2}, offload={"enabled": True}),
    ):
        with pytest.raises(ConfigurationError) as caught:
            attempt()
        found.append(caught.value.message)
    return found


def test_plans_that_do_not_fit_the_model_are_refused_on_every_rank(world: World) -> None:
    for found in world.run(refusals, backend="shm"):
        assert found == [
            "mesh.ep 2 is for models with experts, and this one has none",
            "expert.router_jitter is for models with experts, and this one has none",
            "expert.capacity_factor is 2.0 in the plan, but 1.25 in the layer blocks.0.feed_forward",
            (
                "dp 1 × shard 2 × tp 1 × pp 1 = 2: experts spread over ep, or a sharded optimizer, "
                "do not go with mesh.shard yet"
            ),
            "offload.enabled does not go with experts yet",
        ]
