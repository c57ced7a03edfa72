"""The picture of one recovery in the guide on surviving failures: `python -m benchmarks.recovery_picture`.

A job of four workers is started, rank 0 is killed in the backward pass of a step, and what the workers and the launcher
recorded about it is drawn: nothing in the picture is made up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[1] / "docs" / "guides" / "recovery.png"
FAULT_STEP, NUM_STEPS, NUM_WORKERS = 40, 160, 4
SCRIPT = f"""\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import torsh_distributed as td

plan = td.Plan.model_validate({{"training": {{"steps": {NUM_STEPS}, "batch_size": 48}}}})
with td.distributed(plan, backend="torsh"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    inputs = torch.randn(4800, 256)
    data = DataLoader(TensorDataset(inputs, inputs[:, :8].sin()), batch_size=48, shuffle=True)
    engine = td.parallelize(model, torch.optim.AdamW(model.parameters()), plan, loss_fn=nn.functional.mse_loss)
    for batch in engine.batches(data):
        engine.step(batch)
"""


def record(folder: Path) -> list[dict[str, Any]]:
    """Run the job; the events of all ranks and of the launcher, in the order of time."""
    (folder / "train.py").write_text(SCRIPT)
    fault = f"kill rank 0 at step {FAULT_STEP} in backward"
    options = ["--fault", fault, "--elastic", "--nproc-per-node", str(NUM_WORKERS)]
    command = [sys.executable, "-m", "torsh_distributed.cli.entry_point", "chaos", *options, "train.py"]
    environment = {**os.environ, "TORSH_EVENTS_DIR": str(folder / "events")}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=300)
    lines = [line for path in (folder / "events").glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda event: float(event["time"]))


def draw(events: list[dict[str, Any]], picture: Path) -> None:
    """Steps of every rank as bars, the launcher's decisions as lines: around the loss, and around the joining."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    decisions = [event for event in events if event["type"] == "membership" and event["rank"] == -1]
    lost = next(event["time"] for event in decisions if event["action"] == "lost")
    recovered = [event for event in decisions if event["action"] == "recovered"]
    figure, panels = plt.subplots(1, len(recovered), figsize=(10, 3.2), sharey=True, layout="constrained")
    for panel, event in zip(panels, recovered, strict=True):
        begin = lost if event is recovered[0] else event["time"] - _cost_s(event)
        zero, end = begin - 0.35, event["time"] + 0.35
        for step in events:
            if step["type"] == "step" and zero < step["time"] - step["duration_s"] and step["time"] < end:
                left = (step["time"] - step["duration_s"] - begin) * 1e3
                panel.barh(step["rank"], step["duration_s"] * 1e3, left=left, height=0.6, color="#4c78a8", ec="white")
                if step["duration_s"] > 0.04:
                    middle = left + step["duration_s"] * 500
                    panel.text(middle, step["rank"], step["step"], ha="center", va="center", color="white", fontsize=7)
        what = "worker 0 is killed" if event is recovered[0] else "the new worker enters"
        panel.axvline(0, color="#e45756", lw=1.5, label=what)
        panel.axvline((event["time"] - begin) * 1e3, color="#54a24b", lw=1.5, label="first step of the new world")
        panel.set(xlabel="milliseconds", title=event["detail"].replace("; ", "\n"), yticks=range(NUM_WORKERS))
        panel.title.set_fontsize(9)
        panel.legend(fontsize=7, loc="center")
    panels[0].set_ylabel("rank")
    panels[0].invert_yaxis()
    figure.savefig(picture, dpi=130)


def _cost_s(event: dict[str, Any]) -> float:
    return float(event["detail"].split("cost ")[1].split()[0]) / 1e3


def main() -> None:
    """Record a recovery and draw it."""
    with tempfile.TemporaryDirectory(prefix="torsh-recovery-") as folder:
        draw(record(Path(folder)), PICTURE)
    print(f"drawn: {PICTURE}")


if __name__ == "__main__":
    main()
