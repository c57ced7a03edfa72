"""One sharded parameter as the offloaded optimizer updates it: its shard and gradient may be in a file."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from typing_extensions import override

from torsh_distributed.parallel.offload.storage.tiered_storage import StatePiece, StoredArray, TieredStorage
from torsh_distributed.parallel.offload.update.targets import ParamTarget


class StoredShard:
    """A rank's shard of one parameter in storage, and its gradient there if that is in a file."""

    def __init__(self, name: str, array: StoredArray, storage: TieredStorage) -> None:
        self.name = name
        self.array = array
        self.grad: StoredArray | None = None
        self._storage = storage

    @property
    def is_on_disk(self) -> bool:
        """Whether reading it may have to wait for a disk."""
        return self.array.is_on_disk

    @property
    def num_bytes(self) -> int:
        """Of the shard, padded to the size it has on all ranks."""
        return self.array.payload.numel()

    def prefetch(self) -> None:
        """Ask the kernel to read the shard soon."""
        self.array.allocation.prefetch()

    def note_read(self) -> None:
        """The shard has been read from one end to the other."""
        if self.is_on_disk:
            self._storage.traffic.disk_read_bytes += self.num_bytes
            self.array.allocation.drop_pages()

    def note_written(self) -> None:
        """The shard has been updated."""
        if self.is_on_disk:
            self._storage.traffic.disk_written_bytes += self.num_bytes
            self.array.allocation.drop_pages()

    def keep_grad(self, param: nn.Parameter) -> None:
        """Move the gradient that FSDP2 has just reduced, or added to, into its file."""
        assert self.grad is not None, "hooked only then"
        assert param.grad is not None, "called right after it is reduced"
        place, found = self.grad.view(), param.grad._local_tensor  # type: ignore[attr-defined]  # a DTensor
        assert place is not None, "gradients are stored as plain numbers"
        if found.data_ptr() != place.data_ptr():
            own = place[: found.numel()].view(found.shape)
            own.copy_(found)
            param.grad._local_tensor = own  # type: ignore[attr-defined]  # likewise
        self._storage.traffic.disk_written_bytes += self.grad.payload.numel()
        self.grad.allocation.drop_pages()

    def drop_grad_pages(self) -> None:
        """The gradient has been read."""
        if self.grad is not None:
            self._storage.traffic.disk_read_bytes += self.grad.payload.numel()
            self.grad.allocation.drop_pages()


class ShardTarget(ParamTarget):
    """A parameter whose shard is in storage, where the update changes it in place."""

    def __init__(
        self, param: nn.Parameter, pieces: Sequence[StatePiece], shard: StoredShard, *, is_in_place: bool
    ) -> None:
        super().__init__(shard.name, param, pieces, is_in_place=is_in_place)
        self._shard = shard

    @override
    def prefetch(self, piece: StatePiece) -> None:
        self._shard.prefetch()
        if self._shard.grad is not None:
            self._shard.grad.allocation.prefetch()

    @override
    def publish(self, piece: StatePiece, values: Tensor) -> None:
        super().publish(piece, values)
        if piece is self.pieces[-1]:  # the file of a shard is unmapped as a whole
            self._shard.note_written()
            self._shard.drop_grad_pages()
