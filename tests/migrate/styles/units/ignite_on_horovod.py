"""PyTorch-Ignite on Horovod, as its examples are written: training, metrics, checkpoints, its collectives."""

import tempfile
from pathlib import Path

import ignite.distributed as idist
import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping, PiecewiseLinear, global_step_from_engine
from ignite.metrics import Accuracy, ConfusionMatrix, Loss, Precision, RunningAverage
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
idist.initialize("horovod")
rank, world_size = idist.get_rank(), idist.get_world_size()


def samples(count=32):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, inputs[:, :3].argmax(dim=1)


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def loader_of(batch):
    return idist.auto_dataloader(TensorDataset(*samples()), batch_size=batch * world_size, shuffle=False)


def plain_losses(epochs, batch, rates=None):
    """The same in one process: rank r has samples r, r + 2, …, and both have a batch at a time."""
    model, (inputs, labels) = model_of(), samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found, step = [], 0
    for _ in range(epochs):
        for start in range(0, len(labels), batch * world_size):
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates(step)
            rows = slice(start, start + batch * world_size)
            loss = functional.cross_entropy(model(inputs[rows]), labels[rows])
            found.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    return found


def case_parallel_and_auto_methods():
    found = []

    def training(local_rank, config):
        assert local_rank == idist.get_local_rank()
        model = idist.auto_model(model_of(seed=rank))  # the weights of rank 0 count
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9))

        def update(engine, batch):
            model.train()
            loss = functional.cross_entropy(model(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        trainer = Engine(update)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: found.append(idist.all_reduce(engine.state.output) / world_size)
        )
        trainer.run(loader_of(4), max_epochs=2)
        return model

    with idist.Parallel() as parallel:
        assert parallel.backend is None
        parallel.run(training, {"lr": 0.1})
    assert found == pytest.approx(plain_losses(2, 4), rel=1e-4)


def case_a_supervised_trainer_with_a_schedule():
    model = idist.auto_model(model_of())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses, milestones = [], [(1, 0.1), (8, 0.01)]
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss())
    trainer.add_event_handler(Events.ITERATION_STARTED, PiecewiseLinear(optimizer, "lr", milestones))
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "running")
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda engine: losses.append(idist.all_reduce(engine.state.output) / world_size)
    )
    trainer.run(loader_of(4), max_epochs=2)
    wanted = plain_losses(2, 4, rates=lambda step: 0.1 - 0.09 * max(step - 1, 0) / 7)
    assert losses == pytest.approx(wanted, rel=1e-4)
    assert 0 < trainer.state.metrics["running"] < 2


def case_metrics_are_of_all_ranks():
    model = model_of()
    metrics = {
        "accuracy": Accuracy(),
        "loss": Loss(nn.CrossEntropyLoss()),
        "table": ConfusionMatrix(num_classes=3),
        "precision": Precision(average=False),
    }
    evaluator = create_supervised_evaluator(model, metrics=metrics)
    state = evaluator.run(loader_of(4))
    inputs, labels = samples()
    with torch.no_grad():
        outputs = model(inputs)
    found = outputs.argmax(dim=1)
    assert state.metrics["accuracy"] == pytest.approx((found == labels).float().mean().item())
    assert state.metrics["loss"] == pytest.approx(functional.cross_entropy(outputs, labels).item(), rel=1e-5)
    assert state.metrics["table"].sum() == len(labels)
    wanted = [float(((found == kind) & (labels == kind)).sum() / max(1, (found == kind).sum())) for kind in range(3)]
    assert state.metrics["precision"].tolist() == pytest.approx(wanted)


def case_checkpoints_of_one_rank_resume_all():
    folder = idist.broadcast(tempfile.mkdtemp() if rank == 0 else None, src=0, safe_mode=True)
    data = loader_of(4)

    def parts():
        model = idist.auto_model(model_of(seed=rank))
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        trainer, losses = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss()), []
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: losses.append(idist.all_reduce(engine.state.output) / world_size)
        )
        return {"model": model, "optimizer": optimizer, "trainer": trainer}, losses

    first, losses = parts()
    step_of = global_step_from_engine(first["trainer"])
    saver = Checkpoint(first, DiskSaver(folder, require_empty=False), n_saved=1, global_step_transform=step_of)
    first["trainer"].add_event_handler(Events.EPOCH_COMPLETED(once=1), saver)
    first["trainer"].run(data, max_epochs=2)
    idist.barrier()
    assert losses == pytest.approx(plain_losses(2, 4), rel=1e-4)
    again, resumed = parts()
    (path,) = Path(folder).glob("*.pt")
    Checkpoint.load_objects(again, checkpoint=torch.load(path))
    again["trainer"].run(data, max_epochs=2)
    assert resumed == pytest.approx(losses[len(losses) // 2 :], rel=1e-5)


def case_collectives_of_ignite():
    assert (idist.backend(), idist.model_name()) == ("horovod", "horovod-dist")
    assert idist.all_reduce(rank + 1.0) == 3
    assert idist.all_reduce(torch.tensor([rank + 1.0]), "MAX").tolist() == [2.0]
    assert list(idist.all_gather(float(rank))) == [0.0, 1.0]
    assert idist.all_gather(f"of {rank}") == ["of 0", "of 1"]
    assert torch.equal(idist.all_gather(torch.full((2,), float(rank))), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert idist.broadcast(float(rank + 5), src=1) == 6
    assert idist.broadcast(f"of {rank}", src=1) == "of 1"
    told = []
    idist.one_rank_only(rank=1)(lambda: told.append(rank))()
    assert told == ([1] if rank == 1 else [])
    with idist.one_rank_first():
        idist.get_nproc_per_node()
    idist.barrier()
    assert (idist.get_nnodes(), idist.get_node_rank()) == (1, 0)


def case_early_stopping_and_a_plain_loader():
    model = model_of()
    trainer = Engine(lambda engine, batch: None)
    evaluator = create_supervised_evaluator(model, metrics={"accuracy": Accuracy()})
    evaluator.add_event_handler(
        Events.COMPLETED, EarlyStopping(2, lambda engine: engine.state.metrics["accuracy"], trainer)
    )
    data = DataLoader(TensorDataset(*samples()), batch_size=8)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: evaluator.run(data) and None)
    trainer.run(data, max_epochs=9)
    assert trainer.state.epoch == 3


for name, case in list(globals().items()):
    if name.startswith("case_"):
        case()
        idist.barrier()
        if rank == 0:
            print(f"passed {name.removeprefix('case_')}", flush=True)
