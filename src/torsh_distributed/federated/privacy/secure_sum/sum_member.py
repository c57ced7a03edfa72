"""A client's part in a secure sum.

::

    server sends    the client checks                              and answers
    roster          signatures, its own entry, devices it knows    shares of its two secrets, sealed for each neighbour
    sealed          that each share is for it, of this round       its update under masks with those who shared
    delivered       that it is one of enough                       its signature of this list
    agreements      that enough others have signed the same list   one share of each neighbour's secrets

Secrets are the seed of its own mask and its private key for masks. Of a client that delivered the server needs the
seed, of one that was lost the key; who has both could read the client's update. So a client gives one, once, by a list
that enough others have seen, too.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Protocol

import numpy as np
from torch import Tensor

from torsh_distributed.comm.serialization import deserialize, serialize
from torsh_distributed.errors import ConfigurationError, SerializationError
from torsh_distributed.federated.privacy.secure_sum.mask_words import KeyPair, add_mask, sealed, unsealed
from torsh_distributed.federated.privacy.secure_sum.packed_words import pack_words
from torsh_distributed.federated.privacy.secure_sum.secret_shares import SHARE_BYTES, split_secret
from torsh_distributed.federated.privacy.secure_sum.sum_roster import (
    SUM_STEPS,
    FindUnknown,
    MemberKeys,
    SumContext,
    SumRoster,
    by_number,
)
from torsh_distributed.federated.signatures import is_signed_by


class MessageSigner(Protocol):
    """A device's key."""

    public: bytes

    def sign(self, message: bytes) -> bytes:
        """The signature of the message."""


class SumMember:
    """For one round. Every answer is given once and in order; after an error there are no more."""

    def __init__(
        self,
        context: SumContext,
        update: Tensor,
        weight: int,
        *,
        name: str,
        signer: MessageSigner,
        unknown: FindUnknown,
    ) -> None:
        """`update` is on the grid of the settings; `unknown` says which clients are not the devices of their names."""
        self._context = context
        self._update = update
        self._weight = weight
        self._signer = signer
        self._unknown = unknown
        self._mask_pair, self._share_pair = KeyPair(), KeyPair()
        self._seed = secrets.token_bytes(32)
        unsigned = MemberKeys(
            name=name,
            identity=signer.public,
            mask_public=self._mask_pair.public,
            share_public=self._share_pair.public,
            seed_digest=hashlib.sha256(self._seed).digest(),
        )
        self._keys = MemberKeys.parse([*unsigned.plain()[:-1], signer.sign(unsigned.message(context))])
        self._roster: SumRoster
        self._number = 0
        self._held: dict[int, tuple[bytes, bytes]] = {}
        """By client: this one's shares of its seed and of its key."""
        self._delivered: list[int] = []
        self._steps = list(SUM_STEPS)

    def keys(self) -> bytes:
        """What it sends first, once its update is there."""
        return serialize(self._keys.plain())

    def answer(self, step: str, payload: bytes) -> bytes:
        """To a message of the server; raises ConfigurationError or SerializationError if it may not ask for this."""
        steps, self._steps = self._steps, []
        if not steps or step != steps[0]:
            raise ConfigurationError(
                f"the server asks for {step!r}, and each step is answered once and in its order",
                expected=steps[0] if steps else "nothing more",
            )
        answers = (self._shares, self._masked, self._agreement, self._revealed)
        answer = answers[SUM_STEPS.index(step)](payload)
        self._steps = steps[1:]
        return answer

    def _shares(self, payload: bytes) -> bytes:
        roster = SumRoster.parse(payload, self._context, self._unknown)
        self._number = roster.numbers().get(self._keys.name, 0)
        if not self._number or roster.member(self._number) != self._keys:
            raise ConfigurationError("the round has other keys for this device than it sent")
        if len(roster.members) < roster.fewest:
            raise ConfigurationError(
                f"the server asks for a sum of {len(roster.members)} updates, and {roster.fewest} are the fewest"
            )
        self._roster = roster
        holders, threshold = roster.holders(self._number), roster.plan.threshold
        seed_shares = split_secret(self._seed, holders, threshold)
        key_shares = split_secret(self._mask_pair.private(), holders, threshold)
        self._held[self._number] = seed_shares[self._number], key_shares[self._number]
        boxes = {}
        for other in sorted(roster.neighbours[self._number]):
            purpose = roster.share_purpose(self._number, other)
            key = self._share_pair.shared_key(roster.member(other).share_public, purpose)
            boxes[other] = sealed(key, seed_shares[other] + key_shares[other])
        return serialize(boxes)

    def _masked(self, payload: bytes) -> bytes:
        roster = self._roster
        boxes = by_number(deserialize(payload))
        if not boxes.keys() <= roster.neighbours[self._number]:
            raise ConfigurationError("the server passes shares on of clients that have none for this device")
        if len(boxes) + 1 < roster.plan.threshold:
            raise ConfigurationError(
                f"only {len(boxes) + 1} clients have shared their secrets, and {roster.plan.threshold} are the fewest"
            )
        for other, box in boxes.items():
            purpose = roster.share_purpose(other, self._number)
            # The key is of this round, so who sealed with it has seen this roster: keys of another round do not get in.
            pair = unsealed(self._share_pair.shared_key(roster.member(other).share_public, purpose), box)
            if pair is None or len(pair) != 2 * SHARE_BYTES:
                raise ConfigurationError(f"the shares that came as those of {roster.member(other).name!r} are not")
            self._held[other] = pair[:SHARE_BYTES], pair[SHARE_BYTES:]
        steps = (self._context.settings.steps(self._update) * self._weight).numpy()
        words = np.append(steps, self._weight).astype(np.uint32)  # negative steps wrap around, as they shall
        add_mask(words, self._seed)
        for other in boxes:
            purpose = roster.mask_purpose(self._number, other)
            seed = self._mask_pair.shared_key(roster.member(other).mask_public, purpose)
            add_mask(words, seed, is_negative=other < self._number)
        return pack_words(words, roster.word_bits)

    def _agreement(self, payload: bytes) -> bytes:
        roster, delivered = self._roster, deserialize(payload)
        if not isinstance(delivered, list) or any(type(number) is not int for number in delivered):
            raise SerializationError("a list of clients that is not one of numbers")
        if delivered != sorted({*delivered}) or not {*delivered} <= {*range(1, len(roster.members) + 1)}:
            raise SerializationError("a list of clients with others than those of the round")
        if self._number not in delivered:
            raise ConfigurationError("the server says that this device has not delivered, and asks it to open the sum")
        if len(delivered) < roster.fewest:
            raise ConfigurationError(
                f"the server asks for a sum of {len(delivered)} updates, and {roster.fewest} are the fewest"
            )
        near = roster.holders(self._number) & {*delivered}
        if not near <= self._held.keys():
            raise ConfigurationError("the server says that a client delivered whose masks this device does not have")
        if len(near) < roster.plan.threshold:
            raise ConfigurationError("too few of the clients that share masks with this device have delivered")
        self._delivered = delivered
        return self._signer.sign(roster.delivered_message(delivered))

    def _revealed(self, payload: bytes) -> bytes:
        roster, message = self._roster, self._roster.delivered_message(self._delivered)
        signatures = by_number(deserialize(payload))
        agreed = [
            number
            for number, signature in signatures.items()
            if number in self._delivered and is_signed_by(roster.member(number).identity, signature, message)
        ]
        if len(agreed) < roster.plan.quorum:
            raise ConfigurationError(
                f"only {len(agreed)} clients have signed who delivered, and {roster.plan.quorum} are the fewest: "
                "the server may have told others another list"
            )
        seeds = {number: pair[0] for number, pair in self._held.items() if number in self._delivered}
        keys = {number: pair[1] for number, pair in self._held.items() if number not in self._delivered}
        self._held.clear()
        return serialize([seeds, keys])
