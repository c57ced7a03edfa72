"""What observing a job on a GPU costs: a step of 30 ms with everything on, in turns with steps without."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.cases.observe import paired
from benchmarks.harness import Budget, Case, Note, Row

# The loop asks for its loss in every step, as loops that log do, so the host is at most one step ahead. What observing
# takes of the host while the GPU still computes is hidden behind that, as in any job whose GPU is the bottleneck.
_LOOP = """
import json, os, sys, time, torch, torch.distributed as dist
from torsh_distributed.launch.worker.launcher_line import open_line
from torsh_distributed.observe.metrics.process_metrics import start_reporting, stop_reporting

stop_reporting()
torch.cuda.set_device(0)
dist.init_process_group("nccl")
layers = (torch.nn.Linear(4096, 4096) for _ in range(12))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda())
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows, target_s = 1024, 0.03

def steps(number):
    batch, wanted = torch.ones(rows, 4096, device="cuda"), torch.zeros(rows, 4096, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(number):
        loss = criterion(model(batch), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return (time.perf_counter() - start) / number

steps(20)
for _ in range(3):  # until a step takes as long as it should
    rows = max(8, int(rows * target_s / steps(20)))
"""


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available():
        yield Note(text="There is no GPU here: nothing is measured.")
        return
    yield from paired(budget, name="a step on a GPU", loop=_LOOP, num_ranks=1)


CASE = Case(
    title="Observing: what it costs a step on a GPU",
    about="""torch's DDP over nccl on one GPU, a step of 30 ms that asks for its loss, with summaries, page and report
    on, in turns with steps without. A GPU does the same work in nearly the same time, so a small difference shows; what
    the host does while the GPU computes does not.""",
    rows=_rows,
)
