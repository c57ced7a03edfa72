"""Masks: words of an AES-CTR key stream, from seeds of full width that two clients agree on by X25519."""

from __future__ import annotations

from typing import Any

import numpy as np

from torsh_distributed.errors import InvalidArgument, missing_extra

Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
_CHUNK_WORDS = 1 << 20


class KeyPair:
    """For one round: it is made for it, and forgotten with it."""

    def __init__(self, private: bytes | None = None) -> None:
        x25519 = _library()
        key = x25519.X25519PrivateKey.generate() if private is None else _from_private(x25519, private)
        self._key = key
        self.public: bytes = key.public_key().public_bytes_raw()

    def private(self) -> bytes:
        """To be shared out."""
        value: bytes = self._key.private_bytes_raw()
        return value

    def shared_key(self, public: bytes, purpose: bytes) -> bytes:
        """32 bytes that only the owners of both keys can compute, for this purpose."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            secret = self._key.exchange(_library().X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise InvalidArgument("no secret can be agreed on with this public key of a client") from error
        key: bytes = HKDF(hashes.SHA256(), 32, None, purpose).derive(secret)
        return key


def add_mask(words: Words, seed: bytes, *, is_negative: bool = False) -> None:
    """Add the seed's stream to the words, in place, or take it away; modulo 2**32."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    # A seed is the key of one stream only, so the counter may begin at 0.
    stream = Cipher(algorithms.AES256(seed), modes.CTR(bytes(16))).encryptor()
    for start in range(0, len(words), _CHUNK_WORDS):
        part = words[start : start + _CHUNK_WORDS]
        mask = np.frombuffer(stream.update(bytes(4 * len(part))), dtype="<u4")
        if is_negative:
            part -= mask
        else:
            part += mask


def sealed(key: bytes, message: bytes) -> bytes:
    """Encrypted and authenticated; a key seals one message only."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    box: bytes = ChaCha20Poly1305(key).encrypt(bytes(12), message, None)
    return box


def unsealed(key: bytes, box: bytes) -> bytes | None:
    """The message; None if this key did not seal it."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        message: bytes = ChaCha20Poly1305(key).decrypt(bytes(12), box, None)
    except InvalidTag:
        return None
    return message


def _from_private(library: Any, private: bytes) -> Any:
    return library.X25519PrivateKey.from_private_bytes(private)


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
    except ImportError as error:
        raise missing_extra("federated", "secure aggregation") from error
    return x25519
