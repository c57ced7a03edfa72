"""Which device a rank computes on: a GPU of its own, one that ranks share, or the CPU, for all of a world alike."""

from __future__ import annotations

import functools
import logging

import torch

from torsh_distributed.comm.meeting.rendezvous import Roster
from torsh_distributed.errors import InvalidArgument

_log = logging.getLogger(__name__)

_SHARING = ("torsh", "shm")
"""Backends that carry tensors between ranks on one GPU; NCCL refuses to."""


def gpus_for_ranks(num_local_ranks: int | None) -> int:
    """The visible GPUs, or none if they are too few for the ranks that the launcher has here."""
    count = torch.cuda.device_count()
    return count if num_local_ranks is None or num_local_ranks <= count else 0


def rank_device(local_rank: int, *, num_local_ranks: int, num_gpus: int, roster: Roster, backend: str) -> torch.device:
    """The GPU of the local rank if every rank of the world has one; else one that it shares, or the CPU.

    The node's first rank says which. Ranks share GPUs where every node has one and the backend is ours.
    Raises InvalidArgument where the backend was to be NCCL, which takes one rank for each GPU.
    """
    if num_gpus == 0:
        return torch.device("cpu")
    if roster.has_gpu_each:
        return torch.device("cuda", local_rank)
    facts = f"{num_local_ranks} ranks and {num_gpus} visible {'GPU' if num_gpus == 1 else 'GPUs'} on this node"
    if num_local_ranks <= num_gpus:
        facts = "another node has fewer visible GPUs than ranks"
    if "nccl" in backend:
        raise InvalidArgument(
            f"local rank {local_rank} has no GPU of its own: {facts}",
            hint="start at most as many ranks per node as it has GPUs, or check CUDA_VISIBLE_DEVICES",
            local_rank=local_rank,
            visible_gpus=num_gpus,
        )
    if roster.has_gpus and backend in _SHARING:
        if local_rank == 0:
            _say_once(
                f"ranks share GPUs: {facts}; to develop and debug this is right, for speed start one rank per GPU"
            )
        return torch.device("cuda", local_rank % num_gpus)
    if local_rank == 0:
        _say_once(f"computing on the CPU: {facts}; start at most as many ranks per node as it has GPUs to use them")
    return torch.device("cpu")


@functools.cache
def _say_once(message: str) -> None:
    _log.warning("%s", message)
