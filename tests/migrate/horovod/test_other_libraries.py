"""Libraries that ask torch whether it is initialised find, under Horovod, what its users expect: that it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bed.heavy_imports import LIGHTNING
from tests.bed.world import World
from torsh_distributed.comm.groups import process_group
from torsh_distributed.migrate import horovod as hvd
from torsh_distributed.migrate.stand_in import install

SAMPLES, BATCH, EPOCHS = 16, 8, 2


def _samples() -> list[tuple[Tensor, Tensor]]:
    points = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return [(point, point.sum().reshape(1)) for point in points]


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 1)


def _epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for points, targets in batches:
        optimizer.zero_grad()
        (model(points) - targets).square().mean().backward()
        optimizer.step()


def _alone() -> dict[str, Tensor]:
    """One process on the batches of both ranks: rank r has samples r, r + 2, …, BATCH of all ranks at a time."""
    samples, model = _samples(), _model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    starts = range(0, SAMPLES, BATCH)
    batches = [tuple(map(torch.stack, zip(*samples[start : start + BATCH], strict=True))) for start in starts]
    for _ in range(EPOCHS):
        _epoch(model, optimizer, batches)
    return model.state_dict()


def with_ignite(starts: str) -> tuple[str, str, dict[str, Tensor]]:
    """Ignite's own recipe, on a Horovod that the script or Ignite starts."""
    install("horovod")
    import ignite.distributed as idist
    from ignite.engine import Engine

    if starts == "the script":
        hvd.init()
    else:
        idist.initialize("horovod")
    assert not dist.is_initialized()
    # Seeded differently: the weights of rank 0 count.
    model = idist.auto_model(_model(hvd.rank()))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = idist.auto_dataloader(_samples(), batch_size=BATCH, shuffle=False)

    def update(engine: Any, batch: Any) -> float:
        _epoch(model, optimizer, [batch])
        return 0.0

    Engine(update).run(loader, max_epochs=EPOCHS)
    total = idist.all_reduce(float(idist.get_rank() + 1))
    assert total == 3.0
    idist.barrier()
    found = idist.backend(), idist.model_name(), model.state_dict()
    idist.finalize()
    return found


@pytest.mark.needs_library("ignite")
@pytest.mark.parametrize("starts", ["the script", "Ignite"])
def test_ignite_averages_gradients_through_horovod(world: World, starts: str) -> None:
    results = world.run(with_ignite, starts, num_ranks=2, backend=None)
    for backend, name, weights in results:
        assert (backend, name) == ("horovod", "horovod-dist")
        torch.testing.assert_close(weights, _alone())
    torch.testing.assert_close(results[0][2], results[1][2], rtol=0, atol=0)


def with_lightning() -> dict[str, Tensor]:
    """A Trainer of one device in each rank, whose optimizer is Horovod's: Lightning must see no world of its own."""
    import lightning
    from lightning.fabric.utilities.distributed import _distributed_is_initialized
    from torch.utils.data import DataLoader

    class Fitted(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _model(0)

        def training_step(self, batch: Any, index: int) -> Tensor:
            points, targets = batch
            return (self.layer(points) - targets).square().mean()

        def configure_optimizers(self) -> Any:
            return hvd.DistributedOptimizer(torch.optim.SGD(self.layer.parameters(), lr=0.05, momentum=0.9))

    hvd.init()
    assert not _distributed_is_initialized()
    module = Fitted()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=EPOCHS, **dict.fromkeys(quiet, False))
    mine = _samples()[hvd.rank() :: hvd.size()]
    trainer.fit(module, DataLoader(mine, batch_size=BATCH // hvd.size()))
    assert trainer.world_size == 1
    return module.layer.state_dict()


@pytest.mark.needs_library("lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning_leaves_the_ranks_to_horovod(world: World) -> None:
    for weights in world.run(with_lightning, num_ranks=2, backend=None, imports=LIGHTNING):
        torch.testing.assert_close(weights, _alone())


def _own_group_beside_horovods(meeting: str) -> tuple[float, float, float]:
    hvd.init()
    assert not dist.is_initialized()
    assert process_group.is_initialized()  # this library's own code sees it
    with pytest.raises(ValueError, match="not been initialized"):
        dist.get_rank()
    dist.init_process_group("gloo", init_method=meeting, rank=hvd.rank(), world_size=hvd.size())
    try:
        theirs = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(theirs)
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()
    after = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum)
    return theirs.item(), after.item(), hvd.size()


def test_a_script_may_have_a_group_of_its_own_beside_horovods(world: World, tmp_path: Path) -> None:
    meeting = (tmp_path / "store").as_uri()
    assert world.run(_own_group_beside_horovods, meeting, num_ranks=2, backend=None) == [(3.0, 1.0, 2)] * 2


def _group_before_horovod() -> tuple[bool, float]:
    hvd.init()
    total = torch.ones(())
    dist.all_reduce(total)
    return dist.is_initialized(), total.item() + hvd.allreduce(torch.ones(()), op=hvd.Sum).item()


def test_a_group_that_is_up_before_stays_the_scripts(world: World) -> None:
    assert world.run(_group_before_horovod, num_ranks=2) == [(True, 4.0)] * 2
