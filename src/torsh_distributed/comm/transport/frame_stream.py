"""One end of a connection for an event loop: whatever bytes arrive go in, messages come out. Pure."""

from __future__ import annotations

from torsh_distributed.comm.transport.frames import LENGTHS_BYTES, BadFrame, Buffer, FrameLimits, Frames
from torsh_distributed.comm.trust.handshake import Handshake, NotAMember


class FrameStream:
    """Proves the secret first, then takes frames without a payload: small messages that nobody may have to wait for."""

    def __init__(
        self, secret: bytes, protocol: bytes, *, is_server: bool, wants_signing: bool, most_bytes: int
    ) -> None:
        self._handshake = Handshake(secret, protocol, is_server=is_server, wants_signing=wants_signing)
        self._outgoing = self._handshake.opening
        self._limits = FrameLimits(head_bytes=most_bytes)
        self._frames: Frames | None = None
        self._arrived = bytearray()

    @property
    def is_ready(self) -> bool:
        """Whether the other end has proved the secret, so messages can be sealed."""
        return self._frames is not None

    def take_outgoing(self) -> bytes:
        """What the proof has to send now, before any message."""
        outgoing, self._outgoing = self._outgoing, b""
        return outgoing

    def seal(self, message: bytes) -> bytes:
        """The bytes of the next message; only once ready."""
        if self._frames is None:
            raise BadFrame("a message before the proof")
        return bytes(self._frames.seal(message)[0])

    def feed(self, data: Buffer) -> list[bytes]:
        """The messages that `data` completes, all of them genuine; raises BadFrame at the first that is not."""
        if self._frames is None:
            try:
                self._outgoing += self._handshake.feed(data)
            except NotAMember as error:
                raise BadFrame(str(error)) from error
            if not self._handshake.is_done:
                return []
            self._frames = Frames(self._handshake.signers(), self._limits)
            data = self._handshake.rest
        self._arrived += data
        return self._take_messages(self._frames)

    def _take_messages(self, frames: Frames) -> list[bytes]:
        messages, start, arrived = [], 0, self._arrived
        while len(arrived) - start >= LENGTHS_BYTES:
            prefix = arrived[start : start + LENGTHS_BYTES]
            num_head, _ = frames.lengths(prefix)
            end = start + LENGTHS_BYTES + num_head
            if len(arrived) < end + frames.signature_bytes:
                break
            message = bytes(arrived[start + LENGTHS_BYTES : end])
            start = end + frames.signature_bytes
            frames.check_head(prefix, message, arrived[end:start])
            messages.append(message)
        del arrived[:start]
        return messages
