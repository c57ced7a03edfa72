"""The interface of the dense codecs' arithmetic.

All implementations write the same bytes. `x` is fp32, 1-D, contiguous; `out` of an encoder is uint8 and exactly as long
as the payload, `out` of a decoder fp32 and as long as the message has elements. A decoder writes `weight` times what
the payload says, or adds that with `adds`, and returns whether the payload is one that an encoder can have written.
`key` and `offset` feed `noise`: element i of `x` draws with the index `offset + i`. Blocks are at most 2048 elements,
except for int8.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

TINY = 2.0**-120
"""A block whose scale is below this is sent as zeros: the inverse of its scale would overflow."""

NUM_BINS = 1024
"""Bins of a histogram: 512 for each sign; see `Histogram`."""


class Histogram(NamedTuple):
    """The exact distribution of a tensor's elements, independent of the order of counting.

    A bin holds the floats that share the exponent and the first four bits of the mantissa, so its width is a 32nd to a
    16th of its values. Bin 511 holds the largest magnitude; bin 0 all that is more than 32 octaves
    smaller. Negative elements are in bins 512 to 1023.
    """

    largest: int
    """The upper 13 bits of the largest magnitude, sign and exponent included: what bin 511 is."""
    counts: Tensor
    """Elements in each bin, int64 on the CPU."""
    sums: Tensor
    """Sum of the 24-bit mantissas in each bin, int64 on the CPU; meaningless in bins 0 and 512."""


class Kernels(Protocol):
    """One implementation of the arithmetic."""

    def checksum(self, payload: Tensor) -> int:
        """32 bits that change with every byte of a uint8 tensor; see `noise.checksum`."""

    def int8_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        """Scales (fp32 a block), then codes (int8 an element): round(x 127 / largest magnitude of the block)."""

    def int8_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        """Code times scale."""

    def nbit_encode(self, x: Tensor, block: int, bits: int, key: int, offset: int, out: Tensor) -> None:
        """Middle and step (fp32, fp32 a block), then codes of `bits` bits: levels between least and largest."""

    def nbit_decode(self, payload: Tensor, block: int, bits: int, out: Tensor, weight: float, adds: bool) -> bool:
        """(2 code - last code) times step plus middle."""

    def sign_encode(self, x: Tensor, block: int, out: Tensor) -> None:
        """Mean magnitudes (fp32 a block), then sign bits."""

    def sign_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        """Plus or minus the mean magnitude."""

    def ternary_encode(self, x: Tensor, block: int, threshold: float, out: Tensor) -> None:
        """Mean of the kept magnitudes (fp32 a block), then trits: kept from `threshold` times the largest on."""

    def ternary_draw(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        """Largest magnitudes (fp32 a block), then trits: kept with probability magnitude / largest."""

    def ternary_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        """-1, 0 or +1 times the scale."""

    def natural_encode(self, x: Tensor, block: int, key: int, offset: int, out: Tensor) -> None:
        """Largest exponents (a byte a block), then codes: sign and exponent, relative to the largest, in a byte."""

    def natural_decode(self, payload: Tensor, block: int, out: Tensor, weight: float, adds: bool) -> bool:
        """Plus or minus a power of two, or zero."""

    def histogram(self, x: Tensor) -> Histogram:
        """Count the elements."""

    def codebook_encode(self, x: Tensor, block: int, largest: int, entries: Tensor, bits: int, out: Tensor) -> None:
        """The entry of each element's bin (`entries`: uint8 on the CPU, by bin), packed block by block."""

    def codebook_decode(
        self, payload: Tensor, block: int, codebook: Tensor, out: Tensor, weight: float, adds: bool
    ) -> bool:
        """The value (`codebook`: fp32 on the CPU) of each element's entry."""
