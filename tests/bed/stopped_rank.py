"""What a rank runs in tests of the bed that start a test process of their own: importable without torch."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def stop_here(folder: Path) -> None:
    """Leave the pid in a file; rank 0 stops itself, the others wait for it."""
    import torch.distributed as dist  # here: the process that only asks for ranks needs no torch

    (folder / f"rank-{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
