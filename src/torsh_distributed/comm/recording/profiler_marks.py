"""Our operations in torch's profilers, under c10d's titles (`shm:all_reduce`), with sizes and dtypes.

torch's C++ groups record themselves in a constructor that Python cannot reach, so the groups of this library do it
here. While no profiler runs, a collective looks at one flag of torch's, and that is all. Not in the flight recorder:
that is imported before torch, by whoever waits for torch to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler as torch_profiler
from torch.futures import Future

from torsh_distributed.comm.torch_internals import _profiler_enabled, _RecordFunctionFast

Facts = dict[str, str | int]
"""What a trace shows beside sizes, under the names that c10d's own groups use there."""


def is_profiled() -> bool:
    """Whether a profiler of torch's runs in this process, in whichever thread."""
    return torch_profiler._is_profiler_enabled


def mark(title: str, tensors: Sequence[Tensor], facts: Facts) -> AbstractContextManager[None]:
    """Around an operation: it appears in the profile of this thread."""
    return _RecordFunctionFast(title, list(tensors), dict(facts))


def marked(body: Callable[..., None], title: str, tensors: Sequence[Tensor], facts: Facts) -> Callable[..., None]:
    """`body`, which then appears in the profile of the thread that runs it, for the time it runs."""

    def run(*args: Any) -> None:
        with mark(title, tensors, facts):
            body(*args)

    return run


def begin_mark(title: str, tensors: Sequence[Tensor], facts: Facts) -> Future[None] | None:
    """Start the mark of an operation that another thread may end: set the future's result when it has ended.

    Why a future: a profile belongs to a thread, and torch hands it on to another only inside C++. This is how torch
    itself ends the mark of a remote call. Such a mark goes from the call to the end, like those of c10d's own handles,
    and is asynchronous if another thread ends it. It takes no tensors: their sizes, and who a message is for, are in a
    short mark at the call. None if no profiler runs in this thread.
    """
    if not _profiler_enabled():
        return None
    with mark(f"started {title}", tensors, facts):
        done: Future[None] = torch.futures.Future()
    handle = torch.ops.profiler._record_function_enter_new(title, None)
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(handle, done)
    return done
