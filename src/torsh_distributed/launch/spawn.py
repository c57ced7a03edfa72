"""`spawn`: run a function on local workers, from Python, under the same launcher as `torsh run`.

The function and its results are pickled into a directory that only this user can open: nothing that came over a
socket is unpickled. A function of the main script is found as multiprocessing finds it: every worker imports the
script again, so code that must run once belongs under `if __name__ == "__main__"`.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torsh_distributed.errors import ProcessFailure, SerializationError
from torsh_distributed.launch.job import launch_job
from torsh_distributed.launch.spec import Entry, EntryKind, JobSpec

R = TypeVar("R")


def spawn(function: Callable[..., R], nprocs: int = 2, *, args: tuple[Any, ...] = (), max_restarts: int = 0) -> list[R]:
    """Call `function(*args)` on `nprocs` workers of this node; returns their results by rank.

    A worker finds its rank in the environment, as under `torsh run`. Raises ProcessFailure if one fails; its
    traceback is in the output above.
    """
    with tempfile.TemporaryDirectory(prefix="torsh-spawn-") as folder:
        call = Path(folder) / "call"
        call.write_bytes(_pack(function, args))
        entry = Entry(kind=EntryKind.MODULE, target="torsh_distributed.launch.spawn", args=(folder,))
        exit_code = launch_job(JobSpec(entry=entry, nproc_per_node=nprocs, max_restarts=max_restarts))
        if exit_code:
            raise ProcessFailure(
                "a worker failed",
                hint="its last lines are in the report above",
                operation=f"spawn {getattr(function, '__qualname__', function)}",
                exit_code=exit_code,
            )
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(nprocs)]  # noqa: S301 - our own directory


def _pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    setting = multiprocessing.spawn.get_preparation_data("torsh worker")
    # The key of this process's multiprocessing children: a secret that no worker needs.
    setting.pop("authkey", None)
    try:
        # The setting goes first: the function can be unpickled only in a process prepared with it.
        return pickle.dumps(setting) + pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SerializationError(
            "the function or its arguments cannot be sent to a worker",
            hint="pass a function defined at the top of a module, and arguments that pickle",
            function=repr(function),
            reason=str(error),
        ) from error


def main() -> None:
    """In a worker: unpack the call, make it, and write the result beside it."""
    folder = Path(sys.argv[1])
    with (folder / "call").open("rb") as file:
        multiprocessing.spawn.prepare(pickle.load(file))  # noqa: S301 - written by the launcher, for us alone
        function, args = pickle.load(file)  # noqa: S301
    result = pickle.dumps(function(*args))
    (folder / f"result-{os.environ['RANK']}").write_bytes(result)


if __name__ == "__main__":
    main()
