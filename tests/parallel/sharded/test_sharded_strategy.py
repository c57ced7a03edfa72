"""What a sharded model holds, where it comes from and where it goes: memory, state, buffers, refusals."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.world import World
from tests.parallel.golden import MODELS, STEPS, golden, gpt, make_optimizer, mlp, odd
from torsh_distributed.errors import ConfigurationError, TorshError
from torsh_distributed.parallel.mesh.mesh import Mesh
from torsh_distributed.parallel.sharded.module import FullyShardedDataParallel
from torsh_distributed.parallel.sharded.sharded_strategy import Sharded
from torsh_distributed.parallel.sharded.shared_shards import MemoryStats
from torsh_distributed.plan import FsdpConfig, MeshConfig, Plan
from torsh_distributed.plan.sections.training import PrecisionConfig
from torsh_distributed.train import parallelize

WIDTH = 64


def even() -> nn.Sequential:
    """Four layers whose rows divide by 2 and 4, so that theory needs no rounding."""
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def measure(strategy: Literal["full_shard", "shard_grad_op"]) -> tuple[MemoryStats, MemoryStats, float]:
    model = FullyShardedDataParallel(even(), FsdpConfig(strategy=strategy))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    between = model.memory_stats(optimizer)
    optimizer.step()
    return between, model.memory_stats(optimizer), model.local_sharding_ratio()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_holds_its_share_and_no_more(world: World, num_ranks: int) -> None:
    whole = 4 * (WIDTH * WIDTH + WIDTH) * 4
    for strategy in ("full_shard", "shard_grad_op"):
        for between, after, ratio in world.run(measure, strategy, num_ranks=num_ranks, backend="torsh", timeout_s=60):
            assert after.whole_param_bytes == whole
            assert between.param_bytes == between.grad_bytes == whole / num_ranks
            assert after.optimizer_bytes == pytest.approx(2 * whole / num_ranks, rel=0.01)
            assert after.saved_param_bytes == whole - whole / num_ranks
            assert after.peak_device_bytes is None, "a CPU has no allocator to ask"
            assert ratio == 1 / num_ranks
            # Four pieces: gathered for forward, and again for backward unless they were kept.
            assert after.num_reductions == 4
            assert after.num_gathers == (4 if strategy == "shard_grad_op" else 8)


def weights_of_the_first_rank() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(dist.get_rank())
    norm = nn.BatchNorm1d(3)
    assert norm.running_mean is not None
    norm.running_mean.fill_(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 3), norm)
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    return mine, FullyShardedDataParallel(model).full_state_dict()


def test_all_begin_with_the_weights_and_buffers_of_the_first_rank(world: World) -> None:
    results = world.run(weights_of_the_first_rank, num_ranks=3)
    first = results[0][0]
    assert not torch.equal(first["0.weight"], results[1][0]["0.weight"])
    for _, state in results:
        for name, value in state.items():
            torch.testing.assert_close(value, first[name], rtol=0, atol=0)


def buffers_after_training() -> tuple[Tensor, Tensor, Tensor]:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(4, 3), norm)
    wrapped = FullyShardedDataParallel(model)
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.detach().mean(dim=0)))
    torch.manual_seed(dist.get_rank())
    wrapped(torch.randn(8, 4)).sum().backward()
    assert norm.running_mean is not None
    after_one = norm.running_mean.clone()
    wrapped(torch.randn(8, 4))
    return after_one, seen[1], norm.running_mean


def test_running_means_follow_the_first_rank(world: World) -> None:
    (first, *_), (second, *_) = results = world.run(buffers_after_training)
    assert not torch.equal(first, second), "each rank saw its own batch"
    for _, batch_mean, after_two in results:
        torch.testing.assert_close(after_two, 0.9 * first + 0.1 * batch_mean)


def train_and_stop(state: dict[str, Any] | None, until: int, sections: dict[str, Any]) -> tuple[list[float], Any]:
    make, batches, loss_fn = MODELS["odd"]
    model = make()
    training = {"steps": STEPS, "gradient_clipping": 0.5}
    plan = Plan.from_dict({**sections, "training": training, "ddp": {"find_unused_parameters": True}})
    engine = parallelize(model, make_optimizer(model), plan, loss_fn=loss_fn)
    if state is not None:
        engine.load_state_dict(state)
    losses = []
    for batch in engine.batches(batches):
        losses.append(engine.step(batch))
        if engine.num_steps == until:
            break
    return losses, engine.state_dict() if until < STEPS else None


def test_training_goes_on_at_another_world_size_and_stage(world: World) -> None:
    """Shards of 2, then replicas with a sharded optimizer, then shards of 4 in two replicas, then one rank alone."""
    layouts: list[tuple[int, dict[str, Any]]] = [
        (2, {"mesh": {"dp": 1, "shard": 2}}),
        (2, {"mesh": {"dp": 1, "shard": 2}, "fsdp": {"strategy": "shard_optimizer"}}),
        (4, {"mesh": {"dp": 2, "shard": 2}, "fsdp": {"strategy": "hybrid_shard"}}),
        (1, {}),
    ]
    state, losses = None, []
    for number, (num_ranks, sections) in enumerate(layouts, start=1):
        arguments = (state, 5 * number, sections)
        results = world.run(train_and_stop, *arguments, num_ranks=num_ranks, backend="torsh", timeout_s=120)
        losses += results[0][0]
        state = results[-1][1]
    assert losses == pytest.approx([loss for loss, _ in golden("odd")], abs=1e-4)


LOW_STEPS = 5  # a CPU may have to imitate the format


def in_low_precision(dtype: str) -> tuple[list[float], set[torch.dtype]]:
    make, batches, loss_fn = MODELS["gpt"]
    model = make()
    seen: set[torch.dtype] = set()
    model.get_submodule("blocks.0.query_key_value").register_forward_hook(
        lambda module, args, out: seen.add(module.weight.dtype)
    )
    sections = {"mesh": {"dp": 1, "shard": 2}, "precision": {"dtype": dtype}, "training": {"steps": LOW_STEPS}}
    plan = Plan.from_dict(sections).replace(training={"gradient_clipping": 0.5})
    engine = parallelize(model, make_optimizer(model), plan, loss_fn=loss_fn)
    losses = [engine.step(batch) for batch in engine.batches(batches)]
    assert all(param.dtype == torch.float32 for param in model.parameters())
    return losses, seen


def test_low_precision_travels_and_computes_low_and_stays_close(world: World) -> None:
    """Bound: the first losses, which fall from 3.7 to 2.4, within 0.05 of those in fp32."""
    for dtype, expected in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for losses, seen in world.run(in_low_precision, dtype, backend="torsh", timeout_s=120):
            assert seen == {expected}
            assert losses == pytest.approx([loss for loss, _ in golden("gpt")[:LOW_STEPS]], abs=0.05)


def evaluate_and_inspect() -> tuple[float, float, int, int, list[int]]:
    make, batches, loss_fn = MODELS["mlp"]
    model = make()
    plan = Plan.from_dict({"mesh": {"dp": 1, "shard": 3}, "training": {"steps": STEPS}})
    engine = parallelize(model, make_optimizer(model), plan, loss_fn=loss_fn)
    ragged = [(batches[0][0][:4], batches[0][1][:4]), (batches[1][0][:1], batches[1][1][:1])]
    alone = make()
    plain = sum(loss_fn(alone(inputs), targets).item() * len(inputs) for inputs, targets in ragged) / 5
    found = engine.evaluate(ragged)
    assert isinstance(engine.strategy, Sharded)
    wrapped = engine.strategy.wrapped
    shards = wrapped.shards()
    assert all(shard.size == 0 or shard.start + shard.size <= shard.original_shape[0] for shard in shards)
    return found, plain, wrapped.num_parameters(), len(shards), [shard.size for shard in shards]


def test_evaluation_with_fewer_samples_than_ranks_and_what_each_owns(world: World) -> None:
    results = world.run(evaluate_and_inspect, num_ranks=3)
    rows = [size for name, param in mlp().named_parameters() for size in [param.shape[0]]]
    for found, plain, num_parameters, num_shards, _ in results:
        assert found == pytest.approx(plain, abs=1e-5)
        assert num_parameters == sum(param.numel() for param in mlp().parameters())
        assert num_shards == len(rows)
    assert [sum(sizes) for sizes in zip(*(result[-1] for result in results), strict=True)] == rows


def refused(case: str) -> str:
    rank = dist.get_rank()
    try:
        if case == "shape":
            FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + (rank == 2))))
        elif case == "mixed":
            FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), FsdpConfig(wrap="none"))
        elif case == "strategy":
            FullyShardedDataParallel(nn.Linear(2, 2), FsdpConfig(strategy="no_shard"))
        elif case == "mesh":
            FullyShardedDataParallel(nn.Linear(2, 2), mesh=Mesh(MeshConfig(dp=3)))
        elif case == "norm":
            model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            FullyShardedDataParallel(model, precision=PrecisionConfig(dtype="bf16"))
        elif case == "pattern":
            FullyShardedDataParallel(gpt(), FsdpConfig(wrap_classes=("Layer",)))
        elif case == "algorithm":
            sections = {"mesh": {"shard": 3}, "distributed": {"algorithm": "ring"}}
            parallelize(odd(), lambda params: torch.optim.SGD(params, lr=0.1), Plan.from_dict(sections))
    except TorshError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


REFUSALS = {
    "shape": "the model differs between ranks: 1.weight is (4, 4) float32 on ranks 0, 1; (5, 4) float32 on rank 2",
    "mixed": "0.weight is torch.float32, 1.weight is torch.float64",
    "strategy": "which fsdp.strategy 'no_shard' does not",
    "mesh": "there is nothing to shard over: dp 3",
    "norm": "the batch norm 1 computes in bf16 with running means in torch.float32",
    "pattern": "fsdp.wrap_classes: no module is a Layer",
    "algorithm": "distributed.algorithm = ring does not go together with mesh.shard = 3",
}


def refuse_all(cases: list[str]) -> list[str]:
    return [refused(case) for case in cases]


def test_mistakes_are_refused_on_every_rank_before_the_first_step(world: World) -> None:
    for texts in world.run(refuse_all, list(REFUSALS), num_ranks=3, backend="torsh", timeout_s=120):
        for (case, expected), text in zip(REFUSALS.items(), texts, strict=True):
            assert expected in text, case
            assert "hint:" in text


class Penalised(nn.Module):
    """Adds the squares of its parameters to every output."""

    def __init__(self, *, is_gathered: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.is_gathered = is_gathered

    def forward(self, values: Tensor) -> Tensor:
        penalty: Any = sum(param.square().sum() for param in self.layers.parameters())
        if self.is_gathered and hasattr(penalty, "full_tensor"):
            penalty = penalty.full_tensor()
        return torch.cat([self.layers(values), penalty.expand(len(values), 1)], dim=1)


def penalised_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[:, :4], targets) + 0.1 * outputs[:, 4].mean()


def penalised(is_gathered: bool) -> list[float]:
    torch.manual_seed(0)
    model = Penalised(is_gathered=is_gathered)
    plan = Plan(mesh={"shard": 2}, fsdp={"wrap_names": ["layers"]}, training={"steps": 3, "batch_size": 4})
    engine = parallelize(model, lambda params: torch.optim.SGD(params, lr=0.5), plan, loss_fn=penalised_loss)
    return [engine.step(batch) for batch in engine.batches(penalised_batches())]


def penalised_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator)) for _ in range(3)]


def test_parameters_that_are_read_elsewhere_are_gathered_or_refused(world: World) -> None:
    torch.manual_seed(0)
    model = Penalised(is_gathered=False)
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.5), []
    for inputs, targets in penalised_batches():
        optimizer.zero_grad()
        loss = penalised_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in world.run(penalised, True, backend="torsh"):
        assert losses == pytest.approx(expected, rel=1e-5)
    for outcome in world.outcomes(penalised, False, backend="torsh"):
        assert isinstance(outcome.error, TorshError)
        assert "reads parameters outside of the module they belong to" in str(outcome.error)


def with_penalty_in_the_loss() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss_fn(outputs: Tensor, targets: Tensor) -> Any:
        return nn.functional.mse_loss(outputs, targets) + 0.1 * sum(p.square().sum() for p in model.parameters())

    plan = Plan(mesh={"shard": 2}, training={"steps": 3, "batch_size": 4, "loss_is": "mean"})
    engine = parallelize(model, torch.optim.SGD(model.parameters(), lr=0.5), plan, loss_fn=loss_fn)
    return [engine.step(batch) for batch in engine.batches(penalised_batches())]


def test_a_loss_fn_that_adds_a_penalty_of_shards_is_refused_in_words(world: World) -> None:
    for outcome in world.outcomes(with_penalty_in_the_loss, backend="torsh"):
        assert isinstance(outcome.error, ConfigurationError)
        assert "full_tensor()" in str(outcome.error)


class WithEmpty(nn.Module):
    """Has a parameter without elements, as layers of zero features have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) + self.empty.sum()


def with_empty_parameter(plan: Plan | None) -> list[float]:
    torch.manual_seed(0)
    model = WithEmpty()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if plan is not None:
        engine = parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
        return [engine.step(batch) for batch in engine.batches(penalised_batches())]
    losses = []
    for inputs, targets in penalised_batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
def test_a_parameter_without_elements_is_no_obstacle(world: World, strategy: str) -> None:
    expected = with_empty_parameter(None)
    plan = Plan(mesh={"shard": 2}, fsdp={"strategy": strategy}, training={"steps": 3, "batch_size": 4})
    for losses in world.run(with_empty_parameter, plan, backend="torsh"):
        assert losses == pytest.approx(expected, rel=1e-5)
