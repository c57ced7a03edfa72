"""A trained export behind Ray Serve, on loopback."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bed.ports import free_port
from tests.clusters.engine_marks import RAY
from torsh_distributed.clusters.ray.serving import ServeConfig, load_export, serve_model, stop_serving
from torsh_distributed.errors import InvalidArgument
from torsh_distributed.parallel.weights.tensor_files import TensorFiles

pytestmark = RAY


def build() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(3, 2)


def write_export(model: torch.nn.Module, folder: Path) -> None:
    names = list(model.state_dict())
    draft = folder / "draft"
    draft.mkdir(parents=True)
    series = TensorFiles(draft, names, max_bytes=2**30)
    for name, value in model.state_dict().items():
        series.write(name, value)
    series.finish(folder)
    draft.rmdir()


def ask(url: str, body: object) -> dict[str, Any]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return dict(json.loads(answer.read()))


def test_an_export_is_loaded_whole_and_differences_raise(tmp_path: Path) -> None:
    torch.manual_seed(7)
    trained = torch.nn.Linear(3, 2)
    write_export(trained, tmp_path)
    model = build()
    load_export(model, tmp_path)
    torch.testing.assert_close(model.state_dict(), trained.state_dict(), rtol=0, atol=0)
    with pytest.raises(InvalidArgument):
        load_export(torch.nn.Linear(4, 2), tmp_path)


def test_a_directory_without_an_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="there is no export"):
        serve_model(build, tmp_path)


@pytest.mark.matrix
@pytest.mark.ranks
def test_the_served_model_answers_as_the_trained_one(ray_cluster: Any, tmp_path: Path) -> None:
    torch.manual_seed(7)
    trained = torch.nn.Linear(3, 2)
    write_export(trained, tmp_path)
    url = serve_model(build, tmp_path, config=ServeConfig(port=free_port(), cpus_per_replica=0.5))
    try:
        inputs = [[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]]
        answer = ask(url, {"inputs": inputs})
        torch.testing.assert_close(torch.tensor(answer["outputs"]), trained(torch.tensor(inputs)).detach())
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(url, {"wrong": 1})
    finally:
        stop_serving()
