"""A Lightning `Trainer` whose strategy is a plan: here parameters are sharded over the ranks.

torsh run --nproc-per-node 2 examples/trainers/lightning_trainer.py
torchrun --nproc-per-node 2 examples/trainers/lightning_trainer.py
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torsh_distributed as td
from torsh_distributed.integrations.lightning_trainer import TorshStrategy


class Regression(pl.LightningModule):
    """A small network that predicts the mean magnitude of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam over the final parameters."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


torch.manual_seed(0)
points = torch.randn(512, 16)
data = TensorDataset(points, points.abs().mean(dim=1, keepdim=True))
plan = td.Plan(mesh={"dp": 1, "shard": 2})
trainer = pl.Trainer(
    strategy=TorshStrategy(plan=plan),
    accelerator="auto",
    devices=2,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Regression(), DataLoader(data, batch_size=32))
if trainer.is_global_zero:
    loss = trainer.callback_metrics["loss"]
    print(f"step {trainer.global_step}: loss {loss:.4f} on {torch.distributed.get_backend()}")
