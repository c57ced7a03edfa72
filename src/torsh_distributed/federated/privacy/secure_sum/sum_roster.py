"""Who takes part in a secure sum: each client's keys for this round, signed by the key of its device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import ConfigurationError, SerializationError
from torsh_distributed.federated.privacy.secure_sum.secure_aggregation import SecureAggregation
from torsh_distributed.federated.privacy.secure_sum.sharing_plan import ring_neighbours, sharing_plan
from torsh_distributed.federated.signatures import is_signed_by

SUM_STEPS = ("roster", "sealed", "delivered", "agreements")
"""What the server sends to the clients that have sent their keys, one after the other; each has one answer."""
FindUnknown = Callable[[dict[str, bytes]], list[str]]
"""The names that are not those of these devices, given as name and public key."""
_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SumContext:
    """What the sum is of. It is part of all that is signed and sealed, so nothing of another round fits."""

    settings: SecureAggregation
    fingerprint: str
    """Of the model."""
    numel: int
    round: int
    attempt: int

    def plain(self) -> bytes:
        """The same bytes on both sides."""
        parts = ("torsh-secure-sum-1", repr(self.settings), self.fingerprint, self.numel, self.round, self.attempt)
        return repr(parts).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberKeys:
    """Of one client, for one round."""

    name: str
    identity: bytes
    """The public key of the device."""
    mask_public: bytes
    share_public: bytes
    seed_digest: bytes
    """Of the seed of its own mask: shows whether it was put together from true shares."""
    signature: bytes = b""

    def message(self, context: SumContext) -> bytes:
        """What the device signs."""
        parts = (context.plain(), self.name, self.identity, self.mask_public, self.share_public, self.seed_digest)
        return b"torsh-sum-keys-1" + serialize(list(parts))

    def plain(self) -> list[Any]:
        """To send it."""
        return [self.name, self.identity, self.mask_public, self.share_public, self.seed_digest, self.signature]

    @classmethod
    def parse(cls, parts: Any) -> MemberKeys:
        """What `plain` made, of the right types and sizes."""
        if not isinstance(parts, list) or len(parts) != 6 or not isinstance(parts[0], str):
            raise SerializationError("keys with other parts than expected")
        if not all(isinstance(part, bytes) for part in parts[1:]) or any(len(key) != _KEY_BYTES for key in parts[1:5]):
            raise SerializationError("keys of another size or type")
        name, identity, mask_public, share_public, seed_digest, signature = parts
        return cls(
            name=name,
            identity=identity,
            mask_public=mask_public,
            share_public=share_public,
            seed_digest=seed_digest,
            signature=signature,
        )


class SumRoster:
    """All clients of a sum in the order of their names; a client's number is its place, from 1."""

    def __init__(self, context: SumContext, members: tuple[MemberKeys, ...]) -> None:
        settings = context.settings
        self.context = context
        self.members = members
        self.digest = hashlib.sha256(context.plain() + self.plain()).digest()
        self.plan = sharing_plan(len(members), settings.corrupt, settings.lost)
        self.word_bits = settings.word_bits(len(members))
        # The order of the ring depends on keys that every client has just drawn: nobody chooses its neighbours.
        places = {
            number: hashlib.sha256(self.digest + member.name.encode()).digest()
            for number, member in enumerate(members, 1)
        }
        self.neighbours = ring_neighbours(sorted(places, key=places.__getitem__), self.plan.num_neighbours)

    def member(self, number: int) -> MemberKeys:
        """By its number."""
        return self.members[number - 1]

    def numbers(self) -> dict[str, int]:
        """By name."""
        return {member.name: number for number, member in enumerate(self.members, 1)}

    @property
    def fewest(self) -> int:
        """Clients that must be left at every step."""
        return max(self.plan.quorum, self.context.settings.fewest)

    def holders(self, number: int) -> frozenset[int]:
        """Who has shares of this client's secrets: it and its neighbours."""
        return self.neighbours[number] | {number}

    def delivered_message(self, delivered: list[int]) -> bytes:
        """What clients sign to agree on who delivered."""
        return b"torsh-sum-delivered-1" + self.digest + serialize(delivered)

    def mask_purpose(self, one: int, other: int) -> bytes:
        """The same for both."""
        return b"torsh-sum-mask-1" + self.digest + serialize(sorted((one, other)))

    def share_purpose(self, sender: int, receiver: int) -> bytes:
        """Of one direction."""
        return b"torsh-sum-share-1" + self.digest + serialize([sender, receiver])

    def plain(self) -> bytes:
        """To send it."""
        return serialize([member.plain() for member in self.members])

    @classmethod
    def parse(cls, data: bytes, context: SumContext, unknown: FindUnknown) -> SumRoster:
        """What `plain` made. ConfigurationError unless every client signed its keys, and is the one that is known."""
        parts = deserialize(data)
        if not isinstance(parts, list) or not parts:
            raise SerializationError("a roster that is not a list of clients")
        members = tuple(MemberKeys.parse(part) for part in parts)
        if [member.name for member in members] != sorted({member.name for member in members}):
            raise ConfigurationError("a client is twice in the round, or the names are in no order")
        for kind in ("identity", "mask_public", "share_public"):
            if len({getattr(member, kind) for member in members}) < len(members):
                raise ConfigurationError("two clients of the round have the same key")
        for member in members:
            if not is_signed_by(member.identity, member.signature, member.message(context)):
                raise ConfigurationError(f"the keys that came as those of {member.name!r} are not signed by it")
        for name in unknown({member.name: member.identity for member in members}):
            raise ConfigurationError(f"{name!r} is not a device that this one knows, or has another key")
        return cls(context, members)


def by_number(found: Any) -> dict[int, bytes]:
    """A received value that has bytes for clients' numbers; SerializationError if it is another."""
    if not isinstance(found, dict) or any(type(one) is not int for one in found):
        raise SerializationError("a message that is not by clients' numbers")
    if any(type(value) is not bytes for value in found.values()):
        raise SerializationError("a message with other values than bytes")
    return found
