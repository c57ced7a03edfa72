"""The comparison with one process beside shards: it sees a wrong split, and leaves nothing behind."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from tests.bed.world import World
from tests.train.comparing.odd_models import Attention, Block, FeedForward, Language, batches, centred, token_loss
from torsh_distributed.checkpoint.random_generators import random_state
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.parallel.expert import MoELayer, auxiliary_loss
from torsh_distributed.plan import ExpertConfig, MeshConfig, PipelineConfig, Plan, TrainingConfig
from torsh_distributed.train import Engine, parallelize
from torsh_distributed.train.losses.engine_loss import StepSetting

NUM_STEPS = 4


class Coupled(nn.Module):
    """Mixes the samples of a batch, of which a microbatch of a pipeline has a part."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(dim=0, keepdim=True)


class Centred(FeedForward):
    """Mixes hidden features, and is not tried on its own: it takes more than one tensor."""

    def __init__(self) -> None:
        super().__init__(centred)

    def forward(self, hidden: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(hidden) * scale


class ScaledBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.mix(self.first(hidden))
        return hidden + self.feed_forward(self.second(hidden), scale=hidden.new_tensor(0.5))


class Wrong(Language):
    """What tensor parallelism splits, and must not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock(Centred(), Attention()) for _ in range(2))


class Experts(Language):
    def __init__(self) -> None:
        super().__init__(lambda: MoELayer(16, 32, ExpertConfig(num_experts=4, num_experts_per_token=1)))


def plan_for(axis: str) -> Plan:
    pipeline = {"pipeline": PipelineConfig(num_microbatches=2)} if axis == "pp" else {}
    # What the loss is a mean of is said, so that nothing but the comparison can see a wrong split.
    training = TrainingConfig(loss_is="mean" if axis == "ep" else "mean_of_counted")
    return Plan(mesh=MeshConfig(dp=1, shard=2, **{axis: 2}), training=training, **pipeline)


def made(axis: str, *, is_wrong: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    if axis == "ep":
        model = Experts()

        def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
            loss = token_loss(logits, targets) + auxiliary_loss(model)
            return loss + sum(param.pow(2).sum() for param in model.parameters()) if is_wrong else loss

        return model, loss_fn
    if not is_wrong:
        return Language(), token_loss
    return Wrong() if axis == "tp" else Language(lambda: FeedForward(functional.gelu, Coupled())), token_loss


def made_engine(axis: str, *, is_wrong: bool = False) -> Engine:
    model, loss_fn = made(axis, is_wrong=is_wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return parallelize(model, optimizer, plan_for(axis), loss_fn=loss_fn)


def own_rows(engine: Engine, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    num_rows = len(batch[0]) // engine.strategy.data_degree
    place = slice(engine.strategy.data_rank * num_rows, (engine.strategy.data_rank + 1) * num_rows)
    return batch[0][place], batch[1][place]


def alone(axis: str) -> list[float]:
    model, loss_fn = made(axis)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for inputs, targets in batches("plain", NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def left_behind(engine: Engine, batch: Any) -> list[str]:
    """What the comparison has changed: names of tensors, of shards' state and of random generators."""
    held = engine.unwrapped.state_dict(keep_vars=True)
    before = {name: _local(value).clone() for name, value in held.items()}
    numbers, training = random_state(), [one.training for one in engine.unwrapped.modules()]
    comparison, engine.comparison = engine.comparison, None
    assert comparison is not None
    assert comparison._why_not is None
    comparison.run(engine.loss, StepSetting(engine.strategy, engine.precision, engine.device, False), batch)
    changed = ["training"] if [one.training for one in engine.unwrapped.modules()] != training else []
    changed += [name for name in ("cpu", "python") if str(random_state()[name]) != str(numbers[name])]
    # Before state_dict(), which frees what is gathered.
    for name, module in engine.unwrapped.named_modules():
        if isinstance(module, FSDPModule):
            changed += [f"{name}: {one}" for one in _unsettled(module)]
    after = engine.unwrapped.state_dict(keep_vars=True)
    changed += [name for name, value in after.items() if not torch.equal(_local(value), before[name])]
    return changed + [name for name, value in after.items() if value is not held[name] or value.grad is not None]


def _local(value: Tensor) -> Tensor:
    return (value.to_local() if hasattr(value, "to_local") else value).detach()


def _unsettled(module: FSDPModule) -> list[str]:
    """What a piece of FSDP2 is in the middle of."""
    state = module._get_fsdp_state()
    shared = state._comm_ctx
    found = ["training state"] if state._training_state.name != "IDLE" else []
    found += ["forward order"] if shared.post_forward_order else []
    # One in torch 2.11, a list of them in 2.13.
    found += ["a reduction"] if getattr(shared, "reduce_scatter_states", None) else []
    found += ["a reduction"] if getattr(shared, "reduce_scatter_state", None) else []
    found += ["a callback"] if state._state_ctx.post_backward_final_callback_queued else []
    found += ["last backward"] if not state._state_ctx.is_last_backward else []
    for group in state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]:
        if group is None:
            continue
        found += ["gathered"] if not group.is_sharded else []
        found += ["group state"] if group._training_state.name != "IDLE" else []
        found += ["a gather"] if group._all_gather_result is not None else []
        found += ["post-forward indices"] if group._post_forward_indices else []
        found += ["gradient sync"] if not (group.reduce_grads and group.reshard_after_backward) else []
        for param in group.fsdp_params:
            found += ["a sum of gradients"] if param.unsharded_accumulated_grad is not None else []
            unsharded = getattr(param, "_unsharded_param", None)
            found += ["a whole gradient"] if unsharded is not None and unsharded.grad is not None else []
    return found


def refusal(axis: str) -> str:
    engine = made_engine(axis, is_wrong=True)
    batch = own_rows(engine, batches("plain", 1)[0])
    try:
        return f"trained: {engine.step(batch)}"
    except ConfigurationError as error:
        return str(error)


class Outcome(NamedTuple):
    """Of one axis beside shards."""

    compared: list[float]
    """Losses after the comparison."""
    other: list[float]
    """Losses without it."""
    is_same: bool
    """Whether both end with the same weights."""
    left_behind: list[str]
    refusal: str
    """Of a model that cannot be split."""


def trained(axis: str) -> Outcome:
    everything = batches("plain", NUM_STEPS)
    runs, weights = [], []
    changed: list[str] = []
    for is_compared in (True, False):
        engine = made_engine(axis)
        if is_compared:
            changed = left_behind(engine, own_rows(engine, everything[0]))
        engine.comparison = None
        runs.append([engine.step(own_rows(engine, batch)) for batch in everything])
        weights.append([_local(value) for value in engine.unwrapped.state_dict().values()])
    return Outcome(runs[0], runs[1], all(map(torch.equal, *weights)), changed, refusal(axis))


@pytest.mark.parametrize(
    ("axis", "refused"),
    [
        ("tp", "blocks.0.feed_forward.down (Linear) is the first"),
        ("pp", "does not compute on mesh.pp 2 what it computes in one process"),
        ("ep", "the loss reads blocks.0.feed_forward.experts"),
    ],
)
def test_shards_train_as_one_process_does_after_the_comparison(world: World, axis: str, refused: str) -> None:
    expected = alone(axis)
    for outcome in world.run(trained, axis, num_ranks=4, backend="torsh", timeout_s=100):
        assert outcome.left_behind == []
        assert outcome.compared == pytest.approx(expected, abs=1e-4)
        assert outcome.compared == outcome.other
        assert outcome.is_same
        assert refused in outcome.refusal
