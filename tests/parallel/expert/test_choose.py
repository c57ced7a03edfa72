"""`parallelize` with experts: the plan's way through the Engine, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from tests.parallel.expert.test_expert_strategy import batches, build, one_process
from torsh_distributed import events
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.expert.choose import check_experts
from torsh_distributed.parallel.expert.expert_strategy import ExpertDataParallel
from torsh_distributed.parallel.expert.layer import MoELayer, auxiliary_loss
from torsh_distributed.plan import Plan
from torsh_distributed.plan.sections.expert import ExpertConfig
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.demos import gpt

CONFIG = ExpertConfig(num_experts=4, overflow="none")


def engine_for(mesh: dict[str, int], config: ExpertConfig = CONFIG, **sections: Any) -> Engine:
    model, optimizer = build(CONFIG)

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return gpt.next_character_loss(logits, targets) + auxiliary_loss(model)

    training = {"steps": 6, "gradient_clipping": 0.5}
    plan = Plan(mesh=mesh, expert=config, training=training, **sections)  # type: ignore[arg-type]
    return parallelize(model, optimizer, plan, loss_fn=loss_fn)


def engine_with(config: ExpertConfig, mesh: dict[str, int], group: dist.ProcessGroup | None = None) -> Engine:
    """As `engine_for`, with layers as the config says, or built with a group."""
    model, _ = build(config)
    if group is not None:
        model.blocks[0].feed_forward = MoELayer(16, 32, config, group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return parallelize(model, optimizer, Plan(mesh=mesh), loss_fn=gpt.next_character_loss)  # type: ignore[arg-type]


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


@pytest.mark.matrix
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
        lambda: parallelize(plain, optimizer, Plan(expert=ExpertConfig(router_jitter=0.1))),
        lambda: engine_for({"ep": 2}, CONFIG.replace(capacity_factor=2.0)),
        lambda: engine_for({"ep": 1, "shard": 2}, fsdp={"strategy": "shard_optimizer"}),
        lambda: engine_for({"dp": 2}, offload={"enabled": True}),
        lambda: engine_for({"cp": 2}, compress={"method": "topk"}),
        lambda: engine_with(CONFIG.replace(overflow="drop"), {"cp": 2}),
        lambda: engine_with(CONFIG.replace(router_jitter=0.1), {"tp": 2}),
        lambda: engine_with(CONFIG, {"pp": 2}, group=dist.group.WORLD),
    ):
        with pytest.raises(ConfigurationError) as caught:
            attempt()
        found.append(caught.value.message)
    return found


def test_plans_that_do_not_fit_the_model_are_refused_on_every_rank(world: World) -> None:
    layer = "blocks.0.feed_forward"
    for found in world.run(refusals, backend="shm"):
        # The reason that follows is that of the rule.
        assert [": ".join(one.split(": ")[:2]) for one in found] == [
            "mesh.ep 2 is for models with experts, and this one has none",
            "expert.router_jitter is for models with experts, and this one has none",
            "expert.capacity_factor is 2.0 in the plan, but 1.25 in the layer blocks.0.feed_forward",
            f"{layer}: fsdp.strategy = shard_optimizer does not go together with mesh.shard = 2",
            f"{layer}: offload.enabled = true",
            f"{layer}: compress.method = topk",
            f"{layer}: expert.overflow = drop does not go together with mesh.cp = 2",
            f"{layer}: expert.router_jitter = 0.1 does not go together with mesh.tp = 2",
            f"{layer} was built with a group, and dp 1 × tp 1 × pp 2 = 2 spreads its experts by itself",
        ]


def test_a_plan_that_writes_every_default_fits_a_model_without_experts() -> None:
    saved = Plan.from_dict(Plan().to_dict())
    assert check_experts(nn.Linear(4, 4), saved) == {}


@pytest.mark.parametrize(
    ("config", "sections", "message"),
    [
        (
            CONFIG.replace(rebalance_threshold=0.3),
            {},
            "rebalance_threshold = 0.3 does not go together with mesh.shard",
        ),
        (CONFIG.replace(hot_copies=1), {}, "blocks.0.feed_forward: expert.hot_copies = 1 does not go together with"),
        (CONFIG.replace(hot_copies=3), {}, "hot_copies 3 is above the 2 of 4 experts that a rank does not hold at"),
        (CONFIG.replace(num_experts=3), {}, "num_experts 3 does not spread evenly over mesh.ep 2"),
        (CONFIG, {"fsdp": {"ignored_modules": ["blocks.*.feed_forward.experts"]}}, "fsdp.ignored_modules names the"),
    ],
)
def test_what_does_not_go_with_sharded_experts_is_refused_without_ranks(
    config: ExpertConfig, sections: dict[str, Any], message: str
) -> None:
    plan = Plan(mesh={"dp": 1, "shard": 2, "ep": 2}, **sections)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=message.replace(".", r"\.")):
        check_experts(build(config)[0], plan)
