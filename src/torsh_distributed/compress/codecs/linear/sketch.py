"""Count-sketch: all elements summed in a small table, from which the largest are recovered."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from torsh_distributed.compress.codecs.base import Averaged, Key
from torsh_distributed.compress.codecs.linear.base import LinearCodec, all_reduce_bytes, require_floats
from torsh_distributed.compress.codecs.sparse.random_choice import pieces_of
from torsh_distributed.compress.codecs.sparse.selection import largest
from torsh_distributed.compress.exchange.checked_sum import CheckedSums
from torsh_distributed.compress.kernels.noise import noise
from torsh_distributed.errors import InvalidArgument

_ROWS = 3
_SIGN_BIT = -(2**31)


class SketchCodec(LinearCodec):
    """Add every element, with a random sign, to one of `columns` cells in each of three rows.

    The median over the rows estimates any element up to about |x|/√columns: the largest elements of the *sum* over all
    ranks stand out in the summed table, even those that are large on no single rank. An average takes two rounds: the
    tables, then the exact values of the `num_kept` elements that stand out most.

    Which cell: elements are cut into runs of `columns`, and each run is rotated by its own random amount. Two elements
    of a run never share a cell, others do with probability 1/columns, as for a random function; and whole runs are
    copied, not single elements.
    Payload: 3·columns fp32 cells; `x` itself where table and values would not be smaller than it.
    """

    name = "sketch"

    def __init__(self, columns: int = 10000) -> None:
        super().__init__(columns)
        if not 1 <= columns <= 2**31:
            raise InvalidArgument("a sketch must have 1 to 2**31 columns", columns=columns)
        self.columns = columns

    @property
    def num_kept(self) -> int:
        """How many elements are recovered from the table: at a quarter of its columns most of them are right."""
        return -(-self.columns // 4)

    def is_whole(self, num_elements: int) -> bool:
        """Whether a gradient of that size is sent whole."""
        return num_elements <= _ROWS * self.columns + self.num_kept

    @override
    def payload_bytes(self, num_elements: int) -> int:
        return 4 * (num_elements if self.is_whole(num_elements) else _ROWS * self.columns)

    @override
    def encode(self, x: Tensor, key: Key) -> Tensor:
        if self.is_whole(x.numel()):
            return x.clone()
        turns, bits = self._turns(x.numel(), key, x.device), self._bits(x.numel(), key, x.device)
        table = x.new_empty(_ROWS, self.columns)
        for row in range(_ROWS):
            signed = pad(_with_signs(x, bits, row), (0, -x.numel() % self.columns))
            table[row] = _turned(signed.view(-1, self.columns), turns[row]).sum(dim=0)
        return table.flatten()

    @override
    def decode(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        if self.is_whole(num_elements):
            require_floats(self, payload, num_elements)
            return payload.clone()
        estimates = self.estimates(payload, num_elements, key)
        kept = largest(estimates, self.num_kept)
        return torch.zeros_like(estimates).index_copy_(0, kept, estimates[kept])

    def estimates(self, payload: Tensor, num_elements: int, key: Key) -> Tensor:
        """The table's estimate of every element."""
        require_floats(self, payload, _ROWS * self.columns)
        turns, bits = self._turns(num_elements, key, payload.device), self._bits(num_elements, key, payload.device)
        rows = []
        for row, cells in enumerate(payload.view(_ROWS, self.columns)):
            runs = cells.expand(turns.shape[1], self.columns)
            back = (self.columns - turns[row]) % self.columns
            rows.append(_with_signs(_turned(runs, back).flatten()[:num_elements], bits, row))
        first, second, third = rows
        least, most = torch.minimum(first, second), torch.maximum(first, second)
        return torch.maximum(least, torch.minimum(most, third))

    @override
    def average(self, x: Tensor, group: dist.ProcessGroup, key: Key) -> Averaged:
        if self.is_whole(x.numel()):
            return super().average(x, group, key)
        self.require_agreement(x, group)
        sums = CheckedSums(self.name, group)
        # A table that overflowed, or was damaged for this rank alone, must still select as many elements as elsewhere.
        table = sums.all_reduce(self.encode(x, key)).nan_to_num_()
        kept = largest(self.estimates(table, x.numel(), key), self.num_kept)
        values = x[kept]
        sent = torch.zeros_like(x).index_copy_(0, kept, values)
        sums.all_reduce(values).div_(group.size())
        num_bytes = all_reduce_bytes(4 * (table.numel() + values.numel()), group.size())
        sums.raise_together(x.device)
        return Averaged(torch.zeros_like(x).index_copy_(0, kept, values), sent, num_bytes)

    def _turns(self, num_elements: int, key: Key, device: torch.device) -> Tensor:
        """By how many cells each run is rotated in each row: int64 (rows, runs)."""
        num_runs = -(-num_elements // self.columns)
        drawn = noise(key.shared ^ 0x5BD1E995, 0, _ROWS * num_runs, device).long() & 0xFFFFFFFF
        return (drawn % self.columns).view(_ROWS, num_runs)

    def _bits(self, num_elements: int, key: Key, device: torch.device) -> Tensor:
        """32 random bits for each element; bit r is its sign in row r."""
        bits = torch.empty(num_elements, dtype=torch.int32, device=device)
        for start, length in pieces_of(num_elements, device):
            bits[start : start + length] = noise(key.shared, start, length, device)
        return bits


def _with_signs(x: Tensor, bits: Tensor, row: int) -> Tensor:
    """Flip the sign of each element whose bit for that row is set; applied twice it undoes itself."""
    return (x.view(torch.int32) ^ (bits << 31 - row & _SIGN_BIT)).view(torch.float32)


def _turned(runs: Tensor, turns: Tensor) -> Tensor:
    """Each run (a row of `runs`) rotated to the right by its own number of cells."""
    columns = runs.shape[1]
    if runs.device.type != "cpu":
        places = (torch.arange(columns, device=runs.device) - turns.unsqueeze(1)) % columns
        return runs.gather(1, places)
    turned = torch.empty(runs.shape)  # two copies a run: ten times as fast on a CPU as gathering cell by cell
    for run, (out, turn) in enumerate(zip(turned, turns.tolist(), strict=True)):
        torch.cat([runs[run, columns - turn :], runs[run, : columns - turn]], out=out)
    return turned
