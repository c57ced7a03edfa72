"""How two processes prove to each other that they have the job's secret, and sign what they send afterwards.

::

    client hello   magic (8) | wants signing (1) | random (32)
    server hello   magic (8) | wants signing (1) | random (32) | proof (32)
    client proof   proof (32)

The key of a connection is HMAC-SHA256 of both hellos under the secret, so it is new for every connection: nothing
recorded from another one can be replayed. The server proves the key first and reveals nothing else; the secret never
travels. If one side wants signing, every later message carries an HMAC over direction, sequence number and body, so
messages cannot be forged, reordered, repeated or reflected. Loopback and Unix sockets need no signing: the kernel lets
no other process write into a connection.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import hmac
import secrets
import struct

MAGIC_BYTES = 8
_NONCE_BYTES = 32
MAC_BYTES = 32
HELLO_BYTES = MAGIC_BYTES + 1 + _NONCE_BYTES
_SEQUENCE = struct.Struct("!Q")
_SIGNED, _UNSIGNED = b"\x01", b"\x00"
_SMALL_BYTES = 1 << 12
"""Below, a copy costs less than a second call."""


class NotAMember(Exception):
    """The other end does not speak the protocol or does not have the secret; the connection must be closed."""


class Signer:
    """Signs or checks one direction of a connection: the n-th message has the n-th signature."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def sign(self, *parts: bytes | bytearray | memoryview) -> bytes:
        """The signature of the next message, which may be in several parts."""
        prefix = _SEQUENCE.pack(self._sequence)
        self._sequence += 1
        if sum(map(len, parts)) <= _SMALL_BYTES:
            return hmac.digest(self._key, prefix + b"".join(parts), "sha256")
        signature = hmac.new(self._key, prefix, "sha256")
        for part in parts:
            signature.update(part)
        return signature.digest()

    def check(self, signature: bytes | bytearray | memoryview, *parts: bytes | bytearray | memoryview) -> None:
        """Raise NotAMember unless this is the next message and its signature."""
        if not hmac.compare_digest(self.sign(*parts), signature):
            raise NotAMember("a message is not signed with this connection's key, or is not the next one")


class Handshake:
    """One side of the proof: `feed` takes what arrives and returns what must be sent, until `is_done`.

    `magic` names the protocol and keeps proofs of one protocol from being used in another.
    """

    def __init__(self, secret: bytes, magic: bytes, *, is_server: bool, wants_signing: bool) -> None:
        self._secret = secret
        self._magic = magic
        self._is_server = is_server
        self._hello = magic + (_SIGNED if wants_signing else _UNSIGNED) + secrets.token_bytes(_NONCE_BYTES)
        self._buffer = bytearray()
        self._key = b""
        self.is_done = False
        self.is_signed = False

    @property
    def opening(self) -> bytes:
        """What this side sends before it has heard anything."""
        return b"" if self._is_server else self._hello

    def feed(self, data: bytes | bytearray | memoryview) -> bytes:
        """What to send in reply. Raises NotAMember as soon as the other end is found out."""
        self._buffer += data
        if not self._magic.startswith(self._buffer[:MAGIC_BYTES]):
            raise NotAMember("it speaks a different protocol")
        return self._feed_server() if self._is_server else self._feed_client()

    def _feed_server(self) -> bytes:
        reply = b""
        if not self._key:
            if len(self._buffer) < HELLO_BYTES:
                return b""
            theirs = bytes(self._buffer[:HELLO_BYTES])
            self._derive(theirs, self._hello)
            reply = self._hello + self._proof(b"server")
        if len(self._buffer) >= HELLO_BYTES + MAC_BYTES:
            self._check_proof(b"client", HELLO_BYTES)
        return reply

    def _feed_client(self) -> bytes:
        if len(self._buffer) < HELLO_BYTES + MAC_BYTES:
            return b""
        self._derive(self._hello, bytes(self._buffer[:HELLO_BYTES]))
        self._check_proof(b"server", HELLO_BYTES)
        return self._proof(b"client")

    def _derive(self, client_hello: bytes, server_hello: bytes) -> None:
        self._key = hmac.digest(self._secret, client_hello + server_hello, "sha256")
        self.is_signed = _SIGNED[0] in (client_hello[MAGIC_BYTES], server_hello[MAGIC_BYTES])

    def _proof(self, who: bytes) -> bytes:
        return hmac.digest(self._key, b"proof of the " + who, "sha256")

    def _check_proof(self, who: bytes, start: int) -> None:
        proof = bytes(self._buffer[start : start + MAC_BYTES])
        if not hmac.compare_digest(proof, self._proof(who)):
            raise NotAMember("it does not have the job's secret")
        del self._buffer[: start + MAC_BYTES]
        self.is_done = True

    @property
    def rest(self) -> bytes:
        """What arrived after the proof; only once done."""
        return bytes(self._buffer)

    def signers(self) -> tuple[Signer, Signer] | None:
        """Signers for what is sent and for what is received; None if this connection is not signed."""
        if not self.is_signed:
            return None
        client, server = (
            Signer(hmac.digest(self._key, b"from the " + who, "sha256")) for who in (b"client", b"server")
        )
        return (server, client) if self._is_server else (client, server)
