"""What a step through the Engine costs on a GPU over the same step in a bare torch loop with DDP."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.cases.engine import Job, rows_of
from benchmarks.harness import Budget, Case, Note, Row


def _rows(budget: Budget) -> Iterator[Row | Note]:
    if not torch.cuda.is_available():
        yield Note(text="Not measured here: there is no CUDA device.")
        return
    clippings = {"bf16, 1 rank": None, "bf16, 1 rank, clipping": 1.0}
    yield from rows_of(
        [
            Job(name, 1, "cuda", "nccl", batch_size=128, width=1024, num_layers=8, clipping=clipping)
            for name, clipping in clippings.items()
        ],
        budget,
    )


CASE = Case(
    title="A step through the Engine on a GPU",
    about="""A character GPT of 101 M parameters in bf16, batch 128, fused AdamW, the mean loss at every step, with and
    without clipping. The rival is a handwritten loop around torch's DDP. Both take turns in the same process; the host
    launches kernels hardly faster than the GPU computes, so any overhead of the Engine would show.""",
    rows=_rows,
)
