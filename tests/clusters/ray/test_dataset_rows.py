"""Ray Data as the input of an Engine, with positions that hold at another world size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.clusters.engine_marks import RAY
from torsh_distributed.clusters.ray import RayRows, RayStream, run_training
from torsh_distributed.errors import InvalidArgument

pytestmark = [*RAY, pytest.mark.ranks, pytest.mark.matrix]


def numbers(count: int) -> Any:
    import ray.data

    return ray.data.range(count, override_num_blocks=5).map(lambda row: {"x": [float(row["id"])], "id": row["id"]})


class _Squares(torch.nn.Module):
    """Takes a batch of the dataset and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, id: torch.Tensor) -> torch.Tensor:
        return self.layer(x.float()).square().mean()


def read(data: Any, directory: str, steps: int) -> dict[str, Any]:
    """Train on the rows until `steps`, from the last checkpoint on; tell which rows this rank saw."""
    from torch.utils.data import DataLoader

    import torsh_distributed as td

    td.init()
    torch.manual_seed(0)
    model = _Squares()
    plan = td.Plan(
        training={"steps": steps, "exactly_once": True},
        checkpoint={"enabled": True, "dir": directory, "every_steps": 1},
    )
    engine = td.parallelize(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        plan,
    )
    engine.resume()
    loader = data if isinstance(data, RayStream) else DataLoader(data, batch_size=6, shuffle=True)
    seen: list[int] = []
    for batch in engine.batches(loader, epochs=1):
        seen += batch["id"].tolist()
        engine.step(batch)
    return {"seen": seen, "steps": engine.num_steps}


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_every_row_is_read_once_although_the_world_changes(ray_cluster: Any, tmp_path: Any, kind: str) -> None:
    dataset = numbers(30)
    data = RayRows(dataset) if kind == "rows" else RayStream(dataset.materialize(), batch_size=6)
    first = run_training(read, args=(data, str(tmp_path), 2), num_workers=2)
    rest = run_training(read, args=(data, str(tmp_path), 5), num_workers=1)
    assert rest[0]["steps"] == 5
    seen = [row for rank in [*first, *rest] for row in rank["seen"]]
    assert sorted(seen) == list(range(30))


def test_a_position_of_other_batches_is_refused(ray_cluster: Any) -> None:
    stream = RayStream(numbers(10), batch_size=5)
    with pytest.raises(InvalidArgument, match="batches of another size"):
        stream.load_state_dict({"batches": 1, "batch_size": 4})
