"""What the workers of an elastic test job run: a small model, points for faults, a record of every step."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import torsh_distributed as td
from tests.chaos.faults import mark
from torsh_distributed.events import reached

NUM_STEPS = 30
BATCH = 24


Loader = DataLoader[tuple[torch.Tensor, ...]]


def build(width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer, Loader]:
    """The same model and data in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    inputs = torch.randn(240, 16)
    data = TensorDataset(inputs, inputs[:, :4].sin())
    # A wide model at a high rate amplifies rounding: its losses would not compare.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if width == 64 else 1e-4)
    return model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True)


@dataclass(frozen=True)
class Other:
    """What one worker has otherwise than the rest: `other-RANK.json` says it."""

    samples: int = 240
    evaluated: int = 240
    rate: float = 1.0

    @classmethod
    def of(cls, folder: Path, rank: str) -> Other:
        path = folder / f"other-{rank}.json"
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    @staticmethod
    def part_of(loader: Loader, num_samples: int) -> Loader:
        if num_samples == len(loader.dataset):  # type: ignore[arg-type]  # a TensorDataset has a length
            return loader
        return DataLoader(Subset(loader.dataset, range(num_samples)), batch_size=BATCH, shuffle=True)


def plan_of(folder: Path, num_steps: int, checkpoints: str | None) -> td.Plan:
    """The plan of the job; the test may have put some of it into a file."""
    values: dict[str, object] = {"training": {"steps": num_steps, "batch_size": BATCH}}
    if (folder / "plan.json").exists():
        values |= json.loads((folder / "plan.json").read_text())
    if checkpoints:
        values["checkpoint"] = {"enabled": True, "dir": checkpoints, "every_steps": 5}
    return td.Plan.model_validate(values)


def note_samples(path: Path, step: int, inputs: torch.Tensor, given: torch.Tensor) -> None:
    """Append which samples a forward pass computes."""
    samples = (given[:, None] == inputs[None]).all(-1).int().argmax(1).tolist()
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "samples": samples}) + "\n")


def main() -> None:
    """Train; every worker appends what it saw to a file of its own."""
    folder = Path(sys.argv[1])
    num_steps = int(sys.argv[2])
    backend = sys.argv[3]
    checkpoints = sys.argv[4] if len(sys.argv) > 4 else None
    plan = plan_of(folder, num_steps, checkpoints)
    with td.distributed(plan, backend=backend):
        model, optimizer, loader = build(int((folder / "width").read_text()) if (folder / "width").exists() else 64)
        other = Other.of(folder, os.environ["RANK"])
        optimizer.param_groups[0]["lr"] *= other.rate
        loader = other.part_of(loader, other.samples)
        model.to(td.device() if (folder / "gpu").exists() else "cpu")
        reached("step", 0)
        reached("start")
        engine = td.parallelize(model, optimizer, plan, loss_fn=nn.functional.mse_loss)
        if checkpoints:
            engine.resume()
        if (folder / "wanted").exists():
            td.elastic.scale_by(engine, lambda _: int((folder / "wanted").read_text()), every_s=0.05)
        member = os.environ["RANK"]
        pause_s = float((folder / "pause").read_text()) if (folder / "pause").exists() else 0.02
        inputs = build()[2].dataset.tensors[0]  # type: ignore[attr-defined]  # build() makes it of tensors
        engine.unwrapped.register_forward_pre_hook(
            lambda _, given: note_samples(folder / f"computed-{member}.jsonl", engine.num_steps, inputs, given[0].cpu())
        )
        # In the middle of forward, backward and update, beside the points that the Engine passes itself.
        engine.unwrapped[2].register_forward_pre_hook(lambda *_: reached("layer"))
        # Not `register_hook`, which the Engine calls before the update.
        engine.unwrapped[2].weight.register_post_accumulate_grad_hook(lambda _: reached("gradient"))
        optimizer.register_step_pre_hook(lambda *_: reached("update"))
        optimizer.register_step_post_hook(lambda *_: reached("updated"))
        with (folder / f"steps-{member}.jsonl").open("a", buffering=1) as log:
            for batch in engine.batches(loader):
                if (folder / "slow").exists():
                    time.sleep(pause_s)  # a longer step, while a worker is being started
                loss = engine.step(batch)
                record = {
                    "step": engine.num_steps,
                    "loss": loss,
                    "pid": os.getpid(),
                    "rank": td.rank(),
                    "world": td.world_size(),
                    "samples": len(batch[0]),
                }
                log.write(json.dumps(record) + "\n")
                mark(folder, step=engine.num_steps)
        if (folder / "evaluate").exists():
            engine.evaluate(other.part_of(loader, other.evaluated))
        weights = {name: value.cpu() for name, value in engine.unwrapped.state_dict().items()}
        torch.save(weights, folder / f"weights-{member}.pt")


if __name__ == "__main__":
    main()
