"""Ray Train on our backends, in real workers of a real Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clusters.engine_marks import RAY

pytestmark = [*RAY, pytest.mark.ranks, pytest.mark.matrix]


def train_loop(config: dict[str, Any]) -> None:
    """What a user of Ray Train writes: the world is up, checkpoints and metrics go to Ray."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import torsh_distributed as td
    from torsh_distributed.clusters.ray.train_backend import report_to_ray, resume_from_ray

    torch.manual_seed(0)
    points = torch.randn(96, 4)
    data = TensorDataset(points, points.sum(dim=1, keepdim=True))
    model = nn.Linear(4, 1)
    engine = td.parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        td.Plan(training={"steps": 6}),
        loss_fn=nn.functional.mse_loss,
    )
    has_resumed = resume_from_ray(engine)
    for batch in engine.batches(DataLoader(data, batch_size=16)):
        loss = engine.step(batch)
        if engine.num_steps == 4 and config.get("fails") and not has_resumed:
            raise RuntimeError("a failure that Ray Train restarts after")
        report_to_ray(
            engine,
            {"loss": loss, "backend": td.backend(), "resumed": has_resumed, "world_size": td.world_size()},
            with_checkpoint=engine.num_steps % 3 == 0,
        )


def test_a_run_uses_our_backend_reports_and_comes_back_from_its_checkpoint(ray_cluster: Any, tmp_path: Path) -> None:
    import ray.train

    from torsh_distributed.clusters.ray.train_backend import TorshTrainer

    trainer = TorshTrainer(
        train_loop,
        train_loop_config={"fails": True},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="torsh", storage_path=str(tmp_path), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    result = trainer.fit()
    assert result.error is None
    assert result.metrics["backend"] == "torsh"
    assert result.metrics["world_size"] == 2
    assert result.metrics["resumed"] is True
    assert result.metrics["step"] == 6
    with result.checkpoint.as_directory() as folder:
        assert [path.name for path in Path(folder).iterdir() if path.name.startswith("step-")]


def test_torch_trainer_takes_our_config(ray_cluster: Any, tmp_path: Path) -> None:
    import ray.train
    from ray.train.torch import TorchTrainer

    from torsh_distributed.clusters.ray.train_backend import TorshTorchConfig

    result = TorchTrainer(
        train_loop,
        train_loop_config={},
        torch_config=TorshTorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="gloo", storage_path=str(tmp_path)),
    ).fit()
    assert result.metrics["backend"] == "gloo"
