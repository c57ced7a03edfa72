"""The ranks agree on who stores which box: in full at first, by their signatures while nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torsh_distributed.checkpoint.files.block_hashes import digest_of
from torsh_distributed.checkpoint.files.manifest import data_file
from torsh_distributed.checkpoint.files.tensor_index import IndexedTensor, StoredBox, TensorIndex
from torsh_distributed.checkpoint.saving.box_assignment import TensorClaim, assign, claims_of, from_plain, to_plain
from torsh_distributed.checkpoint.saving.file_image import Allocate, FileImage, private_memory
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.serialization import serialize
from torsh_distributed.parallel.state.held_tensors import HeldTensor, WholeLayout

SIGNATURE_BYTES = 16


class BoxAgreement:
    """Who stores which box of which tensor; every rank of the group makes one and makes the same calls.

    A rank's description of what it holds stays as it is from save to save, so it is kept, with its signature: a rank
    compares what it holds now with what it held then, and tells the others the signature alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._held: list[tuple[str, torch.dtype, WholeLayout]] = []
        self._mine: dict[str, TensorClaim] = {}
        self._signature = b""
        self._signatures: list[bytes] = []
        self.claims: list[dict[str, TensorClaim]] = []
        """What each rank holds."""

    def signature(self, tensors: Sequence[HeldTensor]) -> bytes:
        """`SIGNATURE_BYTES` that change with names, shapes, dtypes and boxes of what this rank holds. Local."""
        held = [(one.name, one.dtype, one.layout) for one in tensors]
        if not self._signature or held != self._held:
            self._mine = claims_of(tensors)
            self._held, self._signature = held, digest_of(serialize(to_plain(self._mine)))
        return self._signature

    def settle(self, signatures: Sequence[bytes]) -> bool:
        """Whether what any rank holds has changed since the last call; then the ranks exchange it in full.

        Every rank calls this with the `signature` of every rank, by rank.
        """
        if list(signatures) == self._signatures:
            return False
        everyone = [to_plain(self._mine)]
        if self._group is not None:
            everyone = all_gather_object(everyone[0], group=self._group)
        self.claims = [from_plain(one) for one in everyone]
        self._signatures = list(signatures)
        return True

    def image(self, tensors: Sequence[HeldTensor], allocate: Allocate = private_memory) -> FileImage:
        """New memory for the boxes that this rank stores, pinned if tensors come from a GPU."""
        is_pinned = any(held.write is None and held.read().device.type == "cuda" for held in tensors[:1])
        return FileImage(tensors, assign(self.claims)[self._rank], is_pinned=is_pinned, allocate=allocate)


def index_of(claims: Sequence[dict[str, TensorClaim]], boxes_by_rank: Sequence[Sequence[Sequence[Any]]]) -> TensorIndex:
    """Where every tensor is: `boxes_by_rank` says what each rank stored, as `FileImage.boxes` does."""
    known: dict[str, TensorClaim] = {}
    for theirs in claims:
        known = {**theirs, **known}
    boxes: dict[str, list[StoredBox]] = {}
    for rank, stored in enumerate(boxes_by_rank):
        for name, at, sizes, start, length, data_start in stored:
            box = StoredBox(tuple(at), tuple(sizes), data_file(rank), start, length, data_start)
            boxes.setdefault(name, []).append(box)
    return TensorIndex(
        {name: IndexedTensor(claim.dtype, claim.shape, tuple(sorted(boxes[name]))) for name, claim in known.items()}
    )
