"""The first steps of a rank without a launcher: run the script as Python would, and write down what ends it.

Run by path (`python rank_start.py script.py ARGS`), so it imports only the standard library and loads what it shares
with the workers of `torsh run` by path too. TORSH_REPORT_DIR says where the report goes: without a launcher nobody else
could say afterwards which rank failed first, and why.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import socket
import sys
import time
from typing import Any

REPORT_VARIABLE = "TORSH_REPORT_DIR"
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SAVED = 75  # as in `checkpoint`: the rank has saved and may be started again
_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib is slow to import
_WORKER = os.path.join(_HERE, os.pardir, os.pardir, "launch", "worker", "worker_start.py")  # noqa: PTH118


def main() -> None:
    """Run what follows on the command line; an exception is reported and raised again."""
    # Batch systems send it before the time limit. A script that saves has a handler; another must not die of it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        # A line is one write, which srun and mpiexec label as one; PYTHONUNBUFFERED would write word by word.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    start = _load_worker_start()
    try:
        start.main()
    except BaseException as error:
        _report(error)
        raise


def _load_worker_start() -> Any:
    spec = importlib.util.spec_from_file_location("torsh_distributed.launch.worker.worker_start", _WORKER)
    assert spec is not None, "a Python file has a spec"
    assert spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _report(error: BaseException) -> None:
    """Leave `rank-N.json` in the directory for reports, whole or not at all."""
    folder = os.environ.get(REPORT_VARIABLE)
    rank = next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), None)
    if not folder or rank is None or (isinstance(error, SystemExit) and error.code in (None, 0, _SAVED)):
        return
    # Loaded by `worker_start` under this name.
    describe = sys.modules["torsh_distributed.launch.worker.raised_error"].describe_error
    found = describe(error, how="exit" if isinstance(error, SystemExit) else "uncaught")
    found.pop("full", None)
    found["exit_code"] = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    found.update(rank=int(rank), host=socket.gethostname(), at_s=time.time())
    path = os.path.join(folder, f"rank-{rank}.json")  # noqa: PTH118
    try:
        fd = os.open(f"{path}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(found, file, default=repr)
        os.rename(f"{path}.part", path)  # noqa: PTH104
    except OSError as problem:
        # The exception itself follows on stderr; only the report about the whole job lacks it.
        sys.stderr.write(f"torsh: the report of rank {rank} cannot be written: {problem}\n")


if __name__ == "__main__":
    main()
