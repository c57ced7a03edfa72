"""The ranks agree on who stores which box: in full at first, by a signature while nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torsh_distributed.checkpoint.files.block_hashes import hash_of
from torsh_distributed.checkpoint.files.manifest import data_file
from torsh_distributed.checkpoint.files.tensor_index import IndexedTensor, StoredBox, TensorIndex
from torsh_distributed.checkpoint.saving.box_assignment import TensorClaim, assign, claims_of, from_plain, to_plain
from torsh_distributed.checkpoint.saving.file_image import Allocate, FileImage, private_memory
from torsh_distributed.comm.collectives.objects import all_gather_object
from torsh_distributed.comm.serialization import serialize
from torsh_distributed.parallel.state.held_tensors import HeldTensor


class BoxAgreement:
    """Who stores which box of which tensor; every rank of the group makes one and makes the same calls."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._signatures: list[str] = []
        self.claims: list[dict[str, TensorClaim]] = []
        """What each rank holds."""

    def update(self, tensors: Sequence[HeldTensor], token: Any = None) -> tuple[bool, Any]:
        """Whether anything has changed since the last call on any rank, and the `token` of the first rank.

        Only a signature travels if nothing has.
        """
        mine = claims_of(tensors)
        signature = hash_of(serialize(to_plain(mine)))
        signatures, everyone = [signature], [mine]
        if self._group is not None:
            answers = all_gather_object([signature, token], group=self._group)
            signatures, token = [one for one, _ in answers], answers[0][1]
            everyone = self.claims
            if signatures != self._signatures:
                everyone = [from_plain(one) for one in all_gather_object(to_plain(mine), group=self._group)]
        has_changed = signatures != self._signatures
        self._signatures, self.claims = signatures, everyone
        return has_changed, token

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
