"""An elastic Horovod script: what was committed survives a crash of a worker, and a new one takes its place.

torsh run --as horovod -np 2 --min-np 1 --max-np 2 python examples/migrate/horovod_elastic.py --crash-marker /tmp/mark
"""

import argparse
import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812 - as Horovod's examples write it


def main() -> None:
    """Fit a line, commit after every few batches, and crash once if asked to."""
    parser = argparse.ArgumentParser(description="Elastic training with Horovod")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batches-per-commit", type=int, default=2)
    parser.add_argument("--crash-marker", help="crash on the last rank, once: after the crash this file exists")
    parser.add_argument("--wait-for", type=int, default=1, help="after the crash, begin epoch 3 with so many ranks")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    inputs = torch.randn(256, 4)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    sampler = hvd.elastic.ElasticSampler(dataset, seed=7)
    loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> float:
        if hvd.rank() == 0:
            done = f"epoch {state.epoch}, batch {state.batch}, {state.steps} steps so far"
            print(f"training from {done}, {hvd.size()} ranks", flush=True)
        loss = torch.zeros(())
        while state.epoch < args.epochs:
            while state.epoch == 3 and hvd.size() < args.wait_for:
                time.sleep(0.1)
                state.check_host_updates()
            for batch_idx, (data, target) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.mse_loss(model(data), target)
                loss.backward()
                optimizer.step()
                state.sampler.record_batch(batch_idx, args.batch_size)
                state.batch += 1
                state.steps += 1
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
                if state.epoch == 1 and state.batch == 5 and hvd.rank() == hvd.size() - 1:
                    crash_once(args.crash_marker)
            state.sampler.set_epoch(state.epoch + 1)
            state.epoch += 1
            state.batch = 0
            state.commit()
        return float(loss.detach())

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, steps=0)
    final = train(state)
    if hvd.rank() == 0:
        print(f"finished after {state.steps} steps with loss {final:.4f}", flush=True)


def crash_once(marker: str | None) -> None:
    """End this process as a power failure would, the first time."""
    if marker and not Path(marker).exists():
        Path(marker).touch()
        os._exit(17)


if __name__ == "__main__":
    main()
