"""Jobs to make objects of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torsh_distributed.clusters.submission import Submission
from torsh_distributed.launch.spec import ElasticSpec, Entry

IMAGE = "registry.example/train:1"


def job(folder: Path, **changes: Any) -> Submission:
    """Two nodes with two ranks each; `options` are added to the image."""
    script = folder / "train.py"
    if not script.exists():
        script.write_text("print('trained')\n")
    options = {"image": IMAGE, **changes.pop("options", {})}
    values: dict[str, Any] = {
        "entry": Entry(target="train.py", args=("--lr", "0.1", "$(HOME)")),
        "name": "train-1",
        "nodes": 2,
        "workers_per_node": 2,
        "working_dir": folder,
        "options": options,
    }
    return Submission(**{**values, **changes})


def full(folder: Path, **options: str) -> Submission:
    """Everything that can be asked for."""
    plan = folder / "plan.toml"
    plan.write_text("dp = 8\n")
    return job(
        folder,
        nodes=4,
        gpus_per_worker=1,
        cpus_per_worker=3,
        memory_per_worker="8G",
        plan=plan,
        env={"LR": "$(nothing)", "A": "b"},
        time_limit_s=3600.5,
        max_restarts=2,
        elastic=ElasticSpec(min_workers=2, max_workers=16),
        options={
            "shm": "4G",
            "volume": "checkpoints:/data",
            "node_selector": "gpu=h100,zone=a",
            "priority_class": "high",
            "service_account": "trainer",
            "user": "1000",
            "pull_secret": "registry",
            "ttl_s": "600",
            "namespace": "team",
            **options,
        },
    )
