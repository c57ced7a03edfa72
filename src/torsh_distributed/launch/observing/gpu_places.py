"""Which GPU each local rank of a node gets, without those that reported errors; pure.

A worker takes the visible GPU of its local rank's number. So the list that it sees is put in another order: a GPU that
is left out changes places with one that no worker needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class GpuPlaces:
    """The visible GPUs of a node, in the order of local ranks; `num_workers` is how many of them compute there."""

    def __init__(self, gpus: Sequence[str], num_workers: int) -> None:
        self._order = list(gpus)
        self._is_shared = num_workers > len(gpus)
        """Whether ranks take turns on a GPU, so that fewer do as well."""
        self.excluded: set[str] = set()

    def gpu_of(self, local_rank: int) -> str | None:
        """The GPU of a worker that has one to itself."""
        return self._order[local_rank] if not self._is_shared and local_rank < len(self._order) else None

    def num_left(self) -> int:
        """GPUs on which workers may be started."""
        return len(self._order) - len(self.excluded & set(self._order))

    def make_room(self, starting: Collection[int], running: Collection[int]) -> bool:
        """Give every starting local rank a GPU that is sound; whether there are enough. Running ones keep theirs."""
        if not self.excluded or self._is_shared:
            return self.num_left() > 0 or not self._order
        needed = {*starting, *running}
        for local_rank in sorted(starting):
            if local_rank < len(self._order) and self._order[local_rank] not in self.excluded:
                continue
            free = [at for at, gpu in enumerate(self._order) if at not in needed and gpu not in self.excluded]
            if not free or local_rank >= len(self._order):
                return False
            at = free[-1]
            self._order[local_rank], self._order[at] = self._order[at], self._order[local_rank]
        return True

    def visible(self, needed: Collection[int]) -> str | None:
        """CUDA_VISIBLE_DEVICES for workers, of which these local ranks need their place; None if nothing is left out.

        A running worker's GPU stays in the list though it reported an error: the others would be counted otherwise.
        """
        if not self.excluded:
            return None
        last = -1 if self._is_shared else max(needed, default=-1)
        return ",".join(gpu for at, gpu in enumerate(self._order) if gpu not in self.excluded or at < last)
