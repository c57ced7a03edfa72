"""Jobs of `torsh run --as horovod --host-discovery-script` for tests, and a check of what their ranks recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.bed.world import ROOT
from tests.lab.network import Host

STYLE = Path(__file__).parents[2] / "styles" / "horovod_elastic_mnist.py"


def set_slots(folder: Path, text: str) -> None:
    (folder / "slots.part").write_text(text)
    (folder / "slots.part").rename(folder / "slots")


def start(
    folder: Path, *options: str, script_args: tuple[str, ...] = (), host: Host | None = None
) -> subprocess.Popen[str]:
    """A job whose script prints the file `slots` of the folder, or fails without it."""
    discover = folder / "discover.sh"
    discover.write_text(f'#!/bin/sh\nexec cat "{folder}/slots"\n')
    discover.chmod(0o755)
    words = [sys.executable, "-m", "torsh_distributed.run", "--as", "horovod", "--host-discovery-script"]
    words += [str(discover), *options, "python", str(STYLE), "--folder", str(folder), *script_args]
    with (folder / "out").open("w") as out:
        if host is not None:
            env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            return host.popen(words, env=env, cwd=folder, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(words, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=env, text=True)


def wait_for(folder: Path, text: str) -> None:
    deadline_s = time.monotonic() + 120.0
    while text not in (folder / "out").read_text():
        assert time.monotonic() < deadline_s, (folder / "out").read_text()
        time.sleep(0.01)


def records(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("steps-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def trained_alone(folder: Path, steps: dict[int, list[list[int]]]) -> dict[str, torch.Tensor]:
    """One process does what the ranks recorded: the mean over the ranks of the gradients of their batches."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(60, 12, generator=generator)
    labels = torch.randint(0, 3, (60,), generator=generator)
    model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    model.load_state_dict(torch.load(folder / "first.pt", weights_only=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in sorted(steps):
        optimizer.zero_grad()
        losses = [cross_entropy(model(images[picked]), labels[picked]) for picked in steps[step] if picked]
        (sum(losses) / len(steps[step])).backward()  # type: ignore[union-attr]  # there is one at least
        optimizer.step()
    return model.state_dict()


def check(folder: Path) -> list[int]:
    """Every sample and step counts once, in one process the same weights come out; the sizes of the worlds."""
    said = records(folder)
    last_size = {one["step"]: one["size"] for one in said if one["event"] == "step" and one["rank"] == 0}
    taken: dict[int, dict[int, list[int]]] = defaultdict(dict)
    samples: dict[int, Counter[int]] = defaultdict(Counter)
    for one in (r for r in said if r["event"] == "step" and r["size"] == last_size[r["step"]]):
        taken[one["step"]][one["rank"]] = one["picked"]  # one that a loss interrupted was done again
    epochs = {one["step"]: one["epoch"] for one in said if one["event"] == "step"}
    # No step is left out, each is done by all ranks of one world.
    assert sorted(taken) == list(range(len(taken)))
    assert all(sorted(ranks) == list(range(last_size[step])) for step, ranks in taken.items())
    for step, ranks in taken.items():
        for picked in ranks.values():
            samples[epochs[step]].update(picked)
    # Every sample once in an epoch, whatever the ranks were meanwhile.
    assert all(count == Counter(range(60)) for count in samples.values()), samples
    alone = trained_alone(folder, {step: [ranks[rank] for rank in sorted(ranks)] for step, ranks in taken.items()})
    together = torch.load(folder / "last.pt", weights_only=True)
    assert all(torch.allclose(together[name], alone[name], atol=1e-5) for name in alone)
    begins = [one for one in said if one["event"] == "begin" and one["rank"] == 0]
    return [one["size"] for one in sorted(begins, key=lambda one: one["step"])]
