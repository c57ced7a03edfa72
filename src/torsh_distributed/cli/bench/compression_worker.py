"""What every process of `torsh bench compression` runs: measure each method; rank 0 writes the result."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from torsh_distributed.comm.groups import process_group
from torsh_distributed.compress.method_timing import time_method
from torsh_distributed.launch.worker.init import distributed


def main() -> None:
    """Time every method on the named backend."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--methods", required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with distributed(backend=options.backend):
        timings = [asdict(time_method(method, options.bytes)) for method in options.methods.split(",")]
        if process_group.rank() == 0:
            options.out.write_text(json.dumps(timings))


if __name__ == "__main__":
    main()
