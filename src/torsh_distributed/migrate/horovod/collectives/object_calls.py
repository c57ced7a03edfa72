"""Python objects between ranks, pickled: ranks of one job trust each other as the script that all of them run.

A pickle runs code, and between nodes whoever sits on the wire can change what gloo carries. So each object is signed
with the job's secret, and nothing that no member of the job has signed is unpickled. A job without a secret, as under
torchrun, has nothing to sign with; there it is as with Horovod itself.
"""

from __future__ import annotations

import hmac
import importlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor

from torsh_distributed.comm.trust.job_secret import job_secret
from torsh_distributed.errors import SerializationError
from torsh_distributed.migrate.horovod.collectives.async_calls import allgather_async, broadcast_async_
from torsh_distributed.migrate.horovod.collectives.operation_submission import synchronize
from torsh_distributed.migrate.horovod.process_sets import ProcessSet, global_process_set
from torsh_distributed.migrate.horovod.world_state import world

_PURPOSE = b"horovod object\0"
_SIGNATURE_BYTES = 32


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The object of `root_rank` on every rank; `name` defaults to the name of its type on this rank."""
    label = name if name is not None else "object"
    is_root = world().rank == root_rank
    data = packed(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    synchronize(broadcast_async_(size, root_rank, f"{label}.sz", process_set))
    buffer = data if is_root else torch.empty(int(size), dtype=torch.uint8)
    synchronize(broadcast_async_(buffer, root_rank, f"{label}.t", process_set))
    return obj if is_root else unpacked(buffer)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, by rank."""
    label = name if name is not None else "objects"
    data = packed(obj)
    sizes = synchronize(allgather_async(torch.tensor([data.numel()]), f"{label}.sz", process_set)).tolist()
    gathered = synchronize(allgather_async(data, f"{label}.t", process_set))
    return [unpacked(part) for part in torch.split(gathered, sizes)]


def packed(obj: Any) -> Tensor:
    """An object as bytes; with cloudpickle, where it is installed, also functions defined in a script."""
    buffer = io.BytesIO()
    try:
        _pickler().dump(obj, buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SerializationError(
            "the object cannot be sent to other ranks",
            hint="send plain data, or install cloudpickle for functions defined inside others",
            type=type(obj).__name__,
            reason=str(error),
        ) from error
    body = buffer.getvalue()
    return torch.frombuffer(bytearray(body + _signature(body)), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """The object in bytes that another rank of this job packed; raises SerializationError if none did."""
    message = data.numpy().tobytes()
    if job_secret() is None:
        return pickle.loads(message)  # noqa: S301 - Horovod's contract: objects of the same script
    body, signature = message[:-_SIGNATURE_BYTES], message[-_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(body)):
        raise SerializationError(
            "an object from another rank is not signed with the job's secret, and was not unpickled",
            hint="all ranks must have the same secret (TORSH_SECRET_FILE, TORSH_JOB_TOKEN); if they do, something on "
            "the network changes the job's data",
            num_bytes=len(message),
        )
    return pickle.loads(body)  # noqa: S301 - signed by a member of this job


def _signature(body: bytes) -> bytes:
    """What only a member of the job can write; empty in a job without a secret."""
    secret = job_secret()
    return b"" if secret is None else hmac.digest(secret, _PURPOSE + body, "sha256")


def _pickler() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle
