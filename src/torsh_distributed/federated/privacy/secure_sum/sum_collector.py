"""The server's part in a secure sum: passes on what clients send each other, adds up, and takes the masks away."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import CommunicationError, ConfigurationError, SerializationError
from torsh_distributed.federated.privacy.secure_sum.mask_words import KeyPair, Words, add_mask
from torsh_distributed.federated.privacy.secure_sum.packed_words import unpack_words
from torsh_distributed.federated.privacy.secure_sum.secret_shares import SHARE_BYTES, join_shares
from torsh_distributed.federated.privacy.secure_sum.sum_roster import (
    SUM_STEPS,
    MemberKeys,
    SumContext,
    SumRoster,
    by_number,
)
from torsh_distributed.federated.signatures import is_signed_by


class SumCollector:
    """For one round: `take_keys` of clients, then `messages` and `take` for each of `SUM_STEPS`, then `total`.

    It knows nothing that it could not pass on to anybody: shares are sealed, updates are masked. A client that does not
    answer a step, or whose answer is refused, is not asked again.
    """

    def __init__(self, context: SumContext, identities: Mapping[str, bytes], fewest: int) -> None:
        """`identities`: the public keys of devices, by name; `fewest`: updates without which there is no sum."""
        self._context = context
        self._identities = identities
        self._fewest = fewest
        self._keys: dict[str, MemberKeys] = {}
        self._roster: SumRoster
        self._numbers: dict[str, int] = {}
        self._boxes: dict[int, dict[int, bytes]] = {}
        self._delivered: set[int] = set()
        self._words: Words = np.zeros(context.numel + 1, dtype=np.uint32)
        self._signatures: dict[int, bytes] = {}
        self._seeds: dict[int, dict[int, bytes]] = {}
        self._lost_keys: dict[int, dict[int, bytes]] = {}
        self._num_revealed = 0

    @property
    def delivered(self) -> list[str]:
        """Whose updates are in the sum."""
        return [self._roster.member(number).name for number in sorted(self._delivered)]

    def take_keys(self, name: str, payload: bytes) -> None:
        """A client's keys; raises ConfigurationError or SerializationError if they are not its own."""
        keys = MemberKeys.parse(deserialize(payload))
        if keys.name != name or keys.identity != self._identities[name]:
            raise ConfigurationError("it sent keys of another device")
        if not is_signed_by(keys.identity, keys.signature, keys.message(self._context)):
            raise ConfigurationError("its keys are not signed by it, for this round and these settings")
        self._keys[name] = keys

    def messages(self, step: str) -> dict[str, bytes]:
        """What to send, to those that answered the step before. CommunicationError if too few have."""
        makers = (self._rosters, self._sealed, self._lists, self._agreements)
        return makers[SUM_STEPS.index(step)]()

    def take(self, step: str, name: str, payload: bytes) -> None:
        """A client's answer; raises ConfigurationError or SerializationError for one that does not count."""
        takers = (self._take_shares, self._take_words, self._take_signature, self._take_revealed)
        takers[SUM_STEPS.index(step)](self._numbers[name], payload)

    def _rosters(self) -> dict[str, bytes]:
        fewest = max(self._fewest, self._context.settings.fewest)
        if len(self._keys) < fewest:
            raise CommunicationError(f"only {len(self._keys)} clients have sent keys, and the sum needs {fewest}")
        self._roster = SumRoster(self._context, tuple(self._keys[name] for name in sorted(self._keys)))
        self._numbers = self._roster.numbers()
        return dict.fromkeys(self._keys, self._roster.plain())

    def _take_shares(self, number: int, payload: bytes) -> None:
        boxes = by_number(deserialize(payload))
        if boxes.keys() != self._roster.neighbours[number]:
            raise SerializationError("it did not send shares for each of its neighbours")
        self._boxes[number] = boxes

    def _sealed(self) -> dict[str, bytes]:
        self._require(len(self._boxes), "shared their secrets")
        return {
            self._roster.member(number).name: serialize(
                {
                    other: self._boxes[other][number]
                    for other in sorted(self._roster.neighbours[number] & self._boxes.keys())
                }
            )
            for number in self._boxes
        }

    def _take_words(self, number: int, payload: bytes) -> None:
        self._words += unpack_words(payload, len(self._words), self._roster.word_bits)
        self._delivered.add(number)

    def _lists(self) -> dict[str, bytes]:
        self._require(len(self._delivered), "delivered")
        return dict.fromkeys(self.delivered, serialize(sorted(self._delivered)))

    def _take_signature(self, number: int, payload: bytes) -> None:
        message = self._roster.delivered_message(sorted(self._delivered))
        if not is_signed_by(self._roster.member(number).identity, payload, message):
            raise ConfigurationError("it did not sign who delivered")
        self._signatures[number] = payload

    def _agreements(self) -> dict[str, bytes]:
        self._require(len(self._signatures), "agreed on who delivered")
        names = [self._roster.member(number).name for number in self._signatures]
        return dict.fromkeys(names, serialize(self._signatures))

    def _take_revealed(self, number: int, payload: bytes) -> None:
        parts = deserialize(payload)
        if not isinstance(parts, list) or len(parts) != 2:
            raise SerializationError("shares with other parts than expected")
        seeds, keys = by_number(parts[0]), by_number(parts[1])
        if any(len(share) != SHARE_BYTES for share in (*seeds.values(), *keys.values())):
            raise SerializationError("shares of another size")
        for kind, shares in ((self._seeds, seeds), (self._lost_keys, keys)):
            for owner, share in shares.items():
                kind.setdefault(owner, {})[number] = share
        self._num_revealed += 1

    def total(self) -> tuple[Tensor, int]:
        """The exact sum of steps of the grid, each as often as its client counts, as int64; and how often in all."""
        self._require(self._num_revealed, "opened the sum", fewest=self._roster.plan.threshold)
        words = self._words.copy()
        for number in self._delivered:
            digest = self._roster.member(number).seed_digest
            seed = self._joined(
                number, self._seeds, lambda found, digest=digest: hashlib.sha256(found).digest() == digest
            )
            add_mask(words, seed, is_negative=True)
        for number in self._boxes.keys() - self._delivered:
            self._remove_masks_of_lost(number, words)
        bits = self._roster.word_bits
        signed = (words & np.uint32(2**bits - 1)).astype(np.int64)
        signed[signed >= 2 ** (bits - 1)] -= 2**bits
        weight = int(signed[-1])
        settings = self._context.settings
        is_possible = len(self._delivered) <= weight <= len(self._delivered) * settings.most_samples
        if not is_possible or np.abs(signed[:-1]).max() > settings.largest_sum(weight):
            raise ConfigurationError(
                "these clients cannot have this sum: one of them sent values beyond the range, or wrong masks"
            )
        return torch.from_numpy(signed[:-1].copy()), weight

    def to_values(self, steps: Tensor) -> Tensor:
        """The sum in the unit of updates, in float64: exact, for the grid is a power of two."""
        return steps.to(torch.float64) * self._context.settings.grid

    def _remove_masks_of_lost(self, number: int, words: Words) -> None:
        """The others' masks with a client that did not deliver, so they do not cancel."""
        public = self._roster.member(number).mask_public
        private = self._joined(number, self._lost_keys, lambda found: KeyPair(found).public == public)
        pair = KeyPair(private)
        for other in self._roster.neighbours[number] & self._delivered:
            purpose = self._roster.mask_purpose(number, other)
            seed = pair.shared_key(self._roster.member(other).mask_public, purpose)
            # What `other` has added is taken away.
            add_mask(words, seed, is_negative=other < number)

    def _joined(self, number: int, shares: Mapping[int, Mapping[int, bytes]], is_right: Any) -> bytes:
        """A client's secret; shares of one hostile client among them do no harm if there are more than needed."""
        held = shares.get(number, {})
        for left_out in (None, *held):
            some = {holder: share for holder, share in held.items() if holder != left_out}
            found = join_shares(some, self._roster.plan.threshold)
            if found is not None and is_right(found):
                return found
        raise CommunicationError(
            f"the secret of {self._roster.member(number).name!r} cannot be put together: "
            f"{len(held)} clients sent shares, {self._roster.plan.threshold} true ones are needed"
        )

    def _require(self, count: int, what: str, fewest: int | None = None) -> None:
        fewest = max(self._fewest, self._roster.fewest) if fewest is None else fewest
        if count < fewest:
            raise CommunicationError(
                f"only {count} of {len(self._roster.members)} clients have {what}, and the sum needs {fewest}"
            )
