"""In the style of Horovod's elastic MNIST example: what a host discovery script says changes while it trains.

`--stages 3,1=node1:1` waits for a world of three ranks, then of one. Rank 0 writes each stage's answer into `slots`
when the one before is reached. Every rank appends what it computes to `steps-PID.jsonl`.
"""

import argparse
import json
import os
import socket
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--stages", default="")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--compatible", action="store_true")
parser.add_argument("--crash-in-stage", type=int)
args = parser.parse_args()

NUM_SAMPLES = 60
STAGES = [int(stage.partition("=")[0]) for stage in args.stages.split(",") if stage]
ANSWERS = [stage.partition("=")[2] or f"localhost:{stage}" for stage in args.stages.split(",")]
generator = torch.Generator().manual_seed(7)
images = torch.randn(NUM_SAMPLES, 12, generator=generator)
labels = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)

hvd.init()
torch.manual_seed(hvd.rank())  # ranks start apart: the state of rank 0 counts
model = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
)
sampler = hvd.elastic.ElasticSampler(range(NUM_SAMPLES), shuffle=True, exactly_once=not args.compatible)
steps = (args.folder / f"steps-{os.getpid()}.jsonl").open("a", buffering=1)


def note(**facts: object) -> None:
    steps.write(json.dumps(facts) + "\n")


def change_slots(stage: int) -> None:
    draft = args.folder / "slots.part"
    draft.write_text(ANSWERS[stage].replace("+", "\n") + "\n")
    draft.rename(args.folder / "slots")


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    note(event="begin", rank=hvd.rank(), size=hvd.size(), step=state.step, stage=state.stage)
    if state.step == 0 and hvd.rank() == 0:
        torch.save(state.model.state_dict(), args.folder / "first.pt")
    while state.stage < len(STAGES) or state.left:
        batch, size = 0, args.batch_size
        # As many rounds as the rank with the most samples has.
        rounds = -(-max(hvd.allgather_object(len(state.sampler))) // size)
        while batch < rounds:
            picked = state.sampler.get_indices(batch, size)
            state.optimizer.zero_grad()
            if picked:
                cross_entropy(state.model(images[picked]), labels[picked]).backward()
            state.optimizer.step()
            note(event="step", step=state.step, rank=hvd.rank(), size=hvd.size(), epoch=state.epoch, picked=picked)
            state.sampler.record_batch(batch, size)
            batch += 1
            state.step += 1
            if state.stage < len(STAGES) and hvd.size() == STAGES[state.stage]:
                state.stage += 1
                state.told = False
            if state.stage < len(STAGES) and not state.told:
                state.told = True
                if hvd.rank() == 0:
                    change_slots(state.stage)
            if args.crash_in_stage == state.stage and hvd.rank() == 1 and not (args.folder / "crashed").exists():
                (args.folder / "crashed").touch()
                os._exit(3)
            state.commit()
        state.epoch += 1
        state.left -= state.stage == len(STAGES)
        state.sampler.set_epoch(state.epoch)
        state.commit()


resets: list[int] = []
state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, stage=0, told=False, left=2
)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state)
note(event="end", rank=hvd.rank(), size=hvd.size(), step=state.step, resets=resets, host=socket.gethostname())
if hvd.rank() == 0:
    torch.save(state.model.state_dict(), args.folder / "last.pt")
