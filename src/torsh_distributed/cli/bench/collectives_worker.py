"""What every process of `torsh bench collectives` runs: measure one backend; rank 0 writes the result.

torch brings up the backend, not this library, so gloo is measured as it is without us.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torsh_distributed.comm.backends.capabilities import BackendType, choose_backend
from torsh_distributed.comm.measurement import time_collective

_DEADLINE = timedelta(minutes=5)


def main() -> None:
    """Time every operation at every size on the named backend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--ops", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.backend == BackendType.NCCL:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(choose_backend(options.backend), timeout=_DEADLINE)
    try:
        timings = [
            asdict(time_collective(op, int(size), duration_s=options.seconds))
            for op in options.ops.split(",")
            for size in options.sizes.split(",")
        ]
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(timings))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
