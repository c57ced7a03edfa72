"""Shamir's secret sharing: any `threshold` shares give the secret, fewer tell nothing about it.

A share is the value of a random polynomial whose value at 0 is the secret. The field is the integers modulo the
smallest prime above 2**256, so every secret of 32 bytes is one of its elements.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Mapping

_PRIME = 2**256 + 297
_SECRET_BYTES = 32
SHARE_BYTES = 33


def split_secret(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, bytes]:
    """A share for each holder; holders are numbers above 0."""
    assert len(secret) == _SECRET_BYTES, "seeds and private keys have 32 bytes"
    coefficients = [secrets.randbelow(_PRIME) for _ in range(threshold - 1)]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * holder % _PRIME
        shares[holder] = ((value + int.from_bytes(secret, "big")) % _PRIME).to_bytes(SHARE_BYTES, "big")
    return shares


def join_shares(shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """The secret that these shares, by holder, are of; None if they are not shares of one secret of 32 bytes."""
    holders = tuple(sorted(shares))[:threshold]
    if len(holders) < threshold or any(len(shares[holder]) != SHARE_BYTES for holder in holders):
        return None
    values = (int.from_bytes(shares[holder], "big") for holder in holders)
    found = sum(weight * value for weight, value in zip(_weights_at_zero(holders), values, strict=True)) % _PRIME
    return found.to_bytes(_SECRET_BYTES, "big") if found < 2 ** (8 * _SECRET_BYTES) else None


@functools.lru_cache(maxsize=256)
def _weights_at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's: the polynomial's value at 0 is the sum of its values times these."""
    weights = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above = above * other % _PRIME
                below = below * (other - holder) % _PRIME
        weights.append(above * pow(below, -1, _PRIME) % _PRIME)
    return tuple(weights)
