"""The Engine against a plain single-process loop: same data, same losses, at every world size."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.bed.world import World
from torsh_distributed import events
from torsh_distributed.errors import (
    BackendNotInitialized,
    ConfigurationError,
    InvalidArgument,
    NonFiniteLoss,
    TensorShapeMismatch,
)
from torsh_distributed.observe import start_reporting, stop_reporting
from torsh_distributed.plan import Plan, TrainingConfig
from torsh_distributed.train import Engine, parallelize

STEPS = 12


def build(batch_size: int = 12, num_samples: int = 60) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    points = torch.randn(num_samples, 6)
    labels = points[:, :3].argmax(dim=1)
    loader = DataLoader(TensorDataset(points, labels), batch_size=batch_size)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader


def reference(
    batch_size: int = 12, num_samples: int = 60, clip: float | None = None, rates: list[float] | None = None
) -> list[float]:
    """Plain torch: no wrapper, no ranks."""
    model, optimizer, loader = build(batch_size, num_samples)
    losses: list[float] = []
    while len(losses) < STEPS:
        for points, labels in loader:
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates[len(losses)]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(points), labels)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    return losses


def make_engine(batch_size: int = 12, num_samples: int = 60, **training: object) -> tuple[Engine, DataLoader[Tensor]]:
    model, optimizer, loader = build(batch_size, num_samples)
    plan = Plan(training=TrainingConfig(steps=STEPS, batch_size=batch_size, **training))  # type: ignore[arg-type]
    return parallelize(model, optimizer, plan, loss_fn=functional.cross_entropy), loader


def train(batch_size: int, num_samples: int, training: dict[str, object]) -> tuple[list[float], float]:
    engine, loader = make_engine(batch_size, num_samples, **training)
    losses = [engine.step(batch) for batch in engine.batches(loader)]
    checksum = sum(param.double().sum().item() for param in engine.unwrapped.parameters())
    return losses, checksum


@pytest.mark.parametrize("num_ranks", [1, 3, *(pytest.param(count, marks=pytest.mark.matrix) for count in (2, 4))])
def test_losses_are_those_of_one_process(world: World, num_ranks: int) -> None:
    results = world.run(train, 12, 60, {}, num_ranks=num_ranks)
    for losses, checksum in results:
        assert losses == pytest.approx(reference(), abs=1e-5)
        assert checksum == pytest.approx(results[0][1], abs=1e-9), "replicas drifted apart"
    assert results[0][0][-1] < results[0][0][0]


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulation_and_clipping_equal_one_large_batch(world: World, accumulation: int) -> None:
    options = {"gradient_accumulation": accumulation, "gradient_clipping": 0.05}
    for losses, _ in world.run(train, 12, 60, options):
        assert losses == pytest.approx(reference(clip=0.05), abs=1e-5)


def test_a_ragged_last_batch_counts_each_sample_once(world: World) -> None:
    """52 samples in batches of 10: the last batch has 2, over 2 ranks; of 7 over 2 ranks: shares of 3 and 4."""
    for batch_size, num_samples in [(10, 52), (7, 49)]:
        for losses, _ in world.run(train, batch_size, num_samples, {}):
            assert losses == pytest.approx(reference(batch_size, num_samples), abs=1e-5)


def resume_elsewhere(state: dict[str, object] | None, until: int) -> tuple[list[float], dict[str, object]]:
    engine, loader = make_engine()
    if state is not None:
        engine.load_state_dict(state)
    losses = []
    for batch in engine.batches(loader):
        losses.append(engine.step(batch))
        if engine.num_steps == until:
            break
    return losses, engine.state_dict()


def test_training_goes_on_in_mid_epoch_at_another_world_size(world: World) -> None:
    [(first, state), _] = world.run(resume_elsewhere, None, 7, num_ranks=2)
    results = world.run(resume_elsewhere, state, STEPS, num_ranks=3)
    for rest, _ in results:
        assert first + rest == pytest.approx(reference(), abs=1e-5)


class Dropping(nn.Module):
    """Dropout and a stale buffer: what resuming must bring back beyond the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()[0]
        self.norm = nn.BatchNorm1d(3)

    def forward(self, points: Tensor) -> Tensor:
        return self.norm(functional.dropout(self.inner(points), 0.3, self.training))


def random_parts(stop: int, state: dict[str, object] | None) -> tuple[list[float], float, dict[str, object]]:
    torch.manual_seed(torch.distributed.get_rank())
    random.seed(torch.distributed.get_rank())
    _, _, loader = build()
    model = Dropping()
    plan = Plan.from_dict({"training": {"steps": 8}, "precision": {"dtype": "fp16", "init_loss_scale": 2.0**20}})
    engine = parallelize(model, torch.optim.Adam, plan, loss_fn=functional.cross_entropy)
    if state is not None:
        engine.load_state_dict(state)
    losses = []
    for batch in engine.batches(loader):
        losses.append(engine.step(batch))
        if len(losses) == stop:
            break
    return losses, random.random(), engine.state_dict()


def test_resuming_brings_back_scaler_dropout_and_buffers(world: World) -> None:
    """Every rank is given the state of rank 0, as from one file."""
    whole = world.run(random_parts, 100, None)
    first = world.run(random_parts, 5, None)
    rest = world.run(random_parts, 100, first[0][2])
    for rank in range(2):
        assert first[rank][0] + rest[rank][0] == whole[rank][0]
        assert rest[rank][2]["precision"] == whole[rank][2]["precision"]
        assert rest[rank][2]["num_skipped"] == whole[rank][2]["num_skipped"]
    assert rest[0][1] != rest[1][1], "every rank has its own generator"


def by_hand(accumulation: int) -> list[float]:
    """microbatches, forward, backward and apply, as in a loop of one's own."""
    engine, loader = make_engine(7, 49, gradient_accumulation=accumulation, gradient_clipping=0.05)
    losses = []
    for batch in engine.batches(loader):
        if accumulation == 1:
            engine.backward(engine.forward(batch))
        else:
            for piece in engine.microbatches(batch):
                engine.backward(engine.forward(piece))
        losses.append(engine.apply())
    return losses


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loop_of_ones_own_gives_the_same(world: World, accumulation: int) -> None:
    """Batches of 7 over 2 ranks: the shares differ, and so do the microbatches."""
    for losses in world.run(by_hand, accumulation):
        assert losses == pytest.approx(reference(7, 49, clip=0.05), abs=1e-5)


def half_an_update_is_forgotten() -> list[float]:
    engine, loader = make_engine(gradient_accumulation=2)
    losses = []
    for batch in engine.batches(loader):
        for piece in engine.microbatches(batch):
            engine.backward(engine.forward(piece) * 100)
            break
        losses.append(engine.step(batch))
    return losses


def test_gradients_of_an_update_that_was_not_applied_do_no_harm(world: World) -> None:
    for losses in world.run(half_an_update_is_forgotten):
        assert losses == pytest.approx(reference(), abs=1e-5)


def nan_on_one_rank(clip: float | None) -> tuple[str, str, bool, list[float]]:
    """Rank 1 gets a nan in its data at step 4; training goes on with the next batch."""
    engine, loader = make_engine(gradient_clipping=clip)
    message, losses = "", []
    for batch in engine.batches(loader):
        points, labels = batch
        if engine.num_steps == 3 and not message:
            before = [param.clone() for param in engine.unwrapped.parameters()]
            if torch.distributed.get_rank() == 1:
                points = points.clone()
                points[0, 0] = float("nan")
            try:
                engine.step((points, labels))
            except NonFiniteLoss as error:
                message = str(error)
                kept = all(map(torch.equal, before, engine.unwrapped.parameters()))
        losses.append(engine.step(batch))
    return message, error_of_apply_alone(engine), kept, losses


def error_of_apply_alone(engine: Engine) -> str:
    try:
        engine.apply()
    except InvalidArgument as error:
        return str(error)
    return "accepted"


def test_a_nan_loss_stops_every_rank_before_parameters_change(world: World) -> None:
    for rank, (message, alone, kept, losses) in enumerate(world.run(nan_on_one_rank, None)):
        assert "the loss of step 4 is nan" in message
        assert f"step=4, ranks=[1], rank={rank}" in message
        assert kept
        assert losses == pytest.approx(reference(), abs=1e-5)
        assert "apply() comes after backward()" in alone


def with_function_and_scheduler() -> list[float]:
    model, _, loader = build()
    plan = Plan(training=TrainingConfig(steps=STEPS, lr_scaling="linear", warmup_steps=3))
    engine = parallelize(
        model,
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        plan,
        loss_fn=functional.cross_entropy,
        scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    return [engine.step(batch) for batch in engine.batches(loader)]


def test_optimizer_function_scaling_warmup_and_scheduler_together(world: World) -> None:
    """Two ranks double the rate: as one process with 0.1, warmed up over 3 steps and decaying by 0.9."""
    rates = [0.1 * 0.9**step * min(1.0, (step + 1) / 3) for step in range(STEPS)]
    for losses in world.run(with_function_and_scheduler):
        assert losses == pytest.approx(reference(rates=rates), abs=1e-5)


def evaluate() -> tuple[float, float]:
    engine, _ = make_engine()
    _, _, held_out = build(batch_size=10, num_samples=51)
    model, _, _ = build()
    points, labels = (torch.stack(column) for column in zip(*held_out.dataset, strict=True))
    seen: list[events.EvaluationEvent] = []
    stop = events.subscribe(seen.append, events.EvaluationEvent)  # type: ignore[arg-type]  # only of that type
    found = engine.evaluate(held_out)
    stop()
    assert [(event.step, event.loss) for event in seen] == [(engine.num_steps, found)]
    return found, functional.cross_entropy(model(points), labels).item()


def test_evaluation_looks_at_every_sample_once(world: World) -> None:
    """51 samples in batches of 10 over 3 ranks: the last batch has one sample, so two ranks have no share of it."""
    for ours, plain in world.run(evaluate, num_ranks=3):
        assert ours == pytest.approx(plain, abs=1e-5)


def count_epochs() -> tuple[list[int | None], int | None, Any]:
    """Two epochs of five batches through the engine, and a step of a loop of its own."""
    reporter = start_reporting(lambda packet: True)
    seen: list[events.StepEvent] = []
    stop = events.subscribe(seen.append, events.StepEvent)  # type: ignore[arg-type]  # only of that type
    engine, loader = make_engine()
    for batch in engine.batches(loader, epochs=2):
        engine.step(batch)
    planned = reporter.facts["total_steps"]
    stop_reporting()
    other, _ = make_engine()
    other.step(next(iter(loader)))
    stop()
    return [event.epoch for event in seen[:-1]], seen[-1].epoch, planned


def test_steps_tell_their_epoch_and_epochs_how_many_steps_there_will_be(world: World) -> None:
    for counted, alone, planned in world.run(count_epochs):
        assert counted == [0] * 5 + [1] * 5
        assert alone is None, "a loop of its own counts no epochs here"
        assert planned == 10, "not the 12 of the plan"


def from_meta(sections: dict[str, object]) -> list[float]:
    """A model without memory, filled where its shards will be, with the weights of the model that has them."""
    weights = build()[0].state_dict()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def fill(module: nn.Module) -> None:
        name = "0" if module.in_features == 6 else "2"
        for kind, param in module.named_parameters(recurse=False):
            param.data.copy_(weights[f"{name}.{kind}"])

    plan = Plan.from_dict({**sections, "training": {"steps": STEPS}})
    engine = parallelize(
        model,
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        plan,
        loss_fn=functional.cross_entropy,
        param_init_fn=fill,
    )
    return [engine.step(batch) for batch in engine.batches(build()[2])]


def test_a_model_on_the_meta_device_is_filled_and_trained(world: World) -> None:
    for losses in world.run(from_meta, {}):
        assert losses == pytest.approx(reference(), abs=1e-5)


class LossInside(nn.Module):
    """As Hugging Face models do: the model takes the batch and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()[0]

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.inner(points), labels)}


def loss_from_the_model() -> list[float]:
    _, _, loader = build()
    model = LossInside()
    engine = parallelize(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), Plan(training=TrainingConfig(steps=STEPS))
    )
    return [engine.step(batch) for batch in engine.batches(loader)]


def test_a_model_may_return_its_loss(world: World) -> None:
    for losses in world.run(loss_from_the_model):
        assert losses == pytest.approx(reference(), abs=1e-5)


def steps_seen() -> list[events.StepEvent]:
    seen: list[events.StepEvent] = []
    buckets: list[events.BucketEvent] = []
    events.subscribe(seen.append, events.StepEvent)  # type: ignore[arg-type]
    events.subscribe(buckets.append, events.BucketEvent)  # type: ignore[arg-type]
    engine, loader = make_engine(gradient_clipping=1.0)
    for batch in engine.batches(loader):
        engine.step(batch)
    parameters = sum(param.numel() for param in engine.unwrapped.parameters())
    assert sum(bucket.num_bytes for bucket in buckets) == STEPS * parameters * 4
    return seen


def test_every_step_is_an_event_with_measured_numbers(world: World) -> None:
    for seen in world.run(steps_seen):
        assert [event.step for event in seen] == list(range(1, STEPS + 1))
        for event in seen:
            assert event.num_samples == 12
            assert event.comm_s is not None
            assert 0 < event.comm_s < event.duration_s
            assert event.grad_norm is not None
            assert event.grad_norm > 0


SHORT_LAST_BATCHES: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"dp": -1}},
    "shards": {"mesh": {"shard": -1}},
    "shards of the optimizer": {"mesh": {"shard": -1}, "fsdp": {"strategy": "shard_optimizer"}},
    "shards, more passes than rows": {"mesh": {"shard": -1}, "training": {"gradient_accumulation": 3}},
    "replicas, more passes than rows": {"mesh": {"dp": -1}, "training": {"gradient_accumulation": 3}},
    "exactly once": {"mesh": {"dp": -1}, "training": {"exactly_once": True}},
}


def short_last_batch(
    values: dict[str, dict[str, object]], kind: str
) -> tuple[list[float], float, list[tuple[int, ...]]]:
    """9 samples in batches of 8: the second batch has fewer samples than there are ranks."""
    seen: list[events.SamplesEvent] = []
    events.subscribe(seen.append, events.SamplesEvent)  # type: ignore[arg-type]
    model, optimizer, loader = build(8, 9)
    plan = Plan.from_dict({**values, "training": {"steps": STEPS, **values.get("training", {})}})
    engine = parallelize(model, optimizer, plan, loss_fn=functional.cross_entropy)
    batches = list(loader) if kind == "list" else loader
    losses = [engine.step(batch) for batch in engine.batches(batches)]
    return losses, engine.evaluate(batches), [event.ids for event in seen]


def loss_at_the_end(batch_size: int, num_samples: int) -> float:
    """Of plain torch, over all samples, after `reference`'s steps."""
    model, optimizer, loader = build(batch_size, num_samples)
    for _ in range(STEPS // len(loader)):
        for points, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(points), labels).backward()
            optimizer.step()
    points, labels = (torch.stack(values) for values in zip(*loader.dataset, strict=True))
    return functional.cross_entropy(model(points), labels).item()


@pytest.mark.parametrize("plan", SHORT_LAST_BATCHES)
def test_a_batch_with_fewer_samples_than_ranks_trains_as_in_one_process(world: World, plan: str) -> None:
    for kind, num_ranks in [("loader", 3), *([("loader", 2), ("list", 3)] if plan == "replicas" else [])]:
        results = world.run(short_last_batch, SHORT_LAST_BATCHES[plan], kind, num_ranks=num_ranks)
        for losses, evaluated, _ in results:
            assert losses == pytest.approx(reference(8, 9), rel=1e-5)
            assert evaluated == pytest.approx(loss_at_the_end(8, 9), rel=1e-5)
        for number in range(0, STEPS, 2):
            assert sorted(sample for *_, ids in results for sample in ids[number]) == list(range(8))
            assert len([sample for *_, ids in results for sample in ids[number + 1]]) == 1


def in_stages(mesh: dict[str, int], accumulation: int) -> tuple[list[float], float]:
    """Batches of 11 and of 1 in 4 microbatches."""
    model, optimizer, loader = build(11, 12)
    values = {
        "mesh": mesh,
        "pipeline": {"num_microbatches": 4},
        "training": {"steps": STEPS, "gradient_accumulation": accumulation},
    }
    engine = parallelize(model, optimizer, Plan.from_dict(values), loss_fn=functional.cross_entropy)
    losses = [engine.step(batch) for batch in engine.batches(loader)]
    return losses, engine.evaluate(loader)


@pytest.mark.parametrize(
    ("mesh", "accumulation"), [({"pp": 2}, 1), ({"dp": 2, "pp": 2}, 2), ({"dp": 1, "shard": 2, "pp": 2}, 1)]
)
def test_stages_train_on_batches_that_their_microbatches_do_not_divide(
    world: World, mesh: dict[str, int], accumulation: int
) -> None:
    num_ranks = 2 * mesh.get("dp", 1) * mesh.get("shard", 1)
    for losses, evaluated in world.run(in_stages, mesh, accumulation, num_ranks=num_ranks):
        assert losses == pytest.approx(reference(11, 12), rel=1e-5)
        assert evaluated == pytest.approx(loss_at_the_end(11, 12), rel=1e-5)


def with_ignored_labels(values: dict[str, Any]) -> list[float]:
    """9 samples in batches of 8, of which every third has a label that does not count."""
    model, optimizer, loader = build(8, 9)
    loader.dataset.tensors[1][::3] = -100
    plan = Plan.from_dict({**values, "training": {"steps": STEPS, "gradient_accumulation": 3}})
    engine = parallelize(model, optimizer, plan, loss_fn=functional.cross_entropy)
    return [engine.step(batch) for batch in engine.batches(loader)]


@pytest.mark.parametrize(
    "plan", [{"mesh": {"dp": 1, "shard": 3}}, {"mesh": {"pp": 2}, "pipeline": {"num_microbatches": 3}}]
)
def test_passes_without_samples_of_their_own_count_no_labels(world: World, plan: dict[str, Any]) -> None:
    model, optimizer, loader = build(8, 9)
    loader.dataset.tensors[1][::3] = -100  # type: ignore[attr-defined]
    expected = []
    for points, labels in [*loader] * (STEPS // 2):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in world.run(with_ignored_labels, plan, num_ranks=3 if "shard" in plan["mesh"] else 2):
        assert losses == pytest.approx(expected, rel=1e-5)


def state_between_batch_and_update() -> tuple[int, int, list[float]]:
    """A state that is taken while a batch is out: it is handed out again, and nothing is lost."""
    engine, loader = make_engine()
    batches = engine.batches(loader)
    losses = [engine.step(next(batches))]
    taken = next(batches)
    other, loader = make_engine()
    other.load_state_dict(engine.state_dict())
    num_batches = engine.num_batches
    losses.append(engine.step(taken))
    assert other.step(next(other.batches(loader))) == losses[1]
    return num_batches, engine.num_batches, losses


def test_a_batch_counts_with_its_update(world: World) -> None:
    assert [found[:2] for found in world.run(state_between_batch_and_update)] == [(1, 2), (1, 2)]


def refused(case: str) -> str:
    model, optimizer, loader = build()
    try:
        if case == "tensor parallel":
            parallelize(model, optimizer, Plan(dp=1, tp=2))
        elif case == "mesh":
            parallelize(model, optimizer, Plan(dp=3))
        elif case == "foreign optimizer":
            parallelize(model, torch.optim.SGD(build()[0].parameters(), lr=0.1))
        elif case == "frozen":
            parallelize(model.requires_grad_(False), optimizer)
        elif case == "vector loss":
            engine = parallelize(model, optimizer, loss_fn=lambda out, labels: out.sum(1))
            engine.step(next(iter(loader)))
        elif case == "single":
            engine = parallelize(model, optimizer, loss_fn=functional.cross_entropy)
            engine.step(torch.zeros(2, 6))
        elif case == "empty":
            engine = parallelize(model, optimizer, loss_fn=functional.cross_entropy)
            engine.step((torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)))
        elif case == "dtype":
            engine = parallelize(model, optimizer, loss_fn=functional.cross_entropy)
            engine.step((torch.zeros(2, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.long)))
        elif case == "other model":
            parallelize(nn.Linear(3, 2 + torch.distributed.get_rank()), torch.optim.SGD)
        elif case == "no batch":
            engine = parallelize(model, optimizer, loss_fn=functional.cross_entropy)
            next(engine.batches([]))
    except (ConfigurationError, InvalidArgument, TensorShapeMismatch) as error:
        return str(error)
    return "accepted"


MISTAKES = {
    "mesh": "dp 3 × tp 1 × pp 1 = 3, but the world has 2 ranks",
    "tensor parallel": "found no layer that tensor parallelism can split",
    "foreign optimizer": "holds none of the model's parameters",
    "frozen": "no parameter that requires a gradient",
    "vector loss": "must be a tensor with one value",
    "single": "must be a pair (inputs, targets)",
    "empty": "the batch is empty",
    "dtype": "batch=['torch.float64'], parameters=['torch.float32']",
    "other model": "weight is (2, 3) float32 on rank 0; (3, 3) float32 on rank 1",
    "no batch": "the loader gave no batch",
}


def refused_each() -> dict[str, str]:
    return {case: refused(case) for case in MISTAKES}


def test_mistakes_are_refused_on_every_rank_before_they_cost(world: World) -> None:
    for answers in world.run(refused_each):
        for case, message in MISTAKES.items():
            assert message in answers[case], case


def epochs_after_a_load() -> tuple[list[int], str]:
    """The epochs of batches after a load at the end of one; what is said of a generator that is to be read again."""
    engine, loader = make_engine()
    for batch in engine.batches(loader, epochs=1):
        engine.step(batch)
        ended = engine.state_dict() if engine.num_batches == len(loader) else None
    assert ended is not None
    engine.load_state_dict(ended)
    resumed = []
    for batch in engine.batches(loader, epochs=2):
        resumed.append(engine.epoch)
        engine.step(batch)
    begun, loader = make_engine()
    start = begun.state_dict()
    try:
        for batch in begun.batches(iter(list(loader)), epochs=1):
            begun.step(batch)
            if begun.num_batches == len(loader):
                begun.load_state_dict(start)  # as a roll back to the epoch's first batch does
    except InvalidArgument as error:
        return resumed, str(error)
    return resumed, "accepted"


def test_an_epoch_that_is_over_is_not_empty_and_a_generator_that_is_used_up_is(world: World) -> None:
    for resumed, refusal in world.run(epochs_after_a_load):
        assert resumed == [1] * 5  # of epoch 0 nothing is left
        assert "the loader gave no batch" in refusal
        assert "a generator gives each batch once" in refusal


def test_parallelize_needs_the_group() -> None:
    model, optimizer, _ = build()
    with pytest.raises(BackendNotInitialized, match=r"torsh_distributed\.init"):
        parallelize(model, optimizer)
