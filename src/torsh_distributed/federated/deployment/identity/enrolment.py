"""The server's list of devices and tokens, in one file that is replaced as a whole."""

from __future__ import annotations

import hashlib
import secrets
import threading
from pathlib import Path
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated.rounds.round_file import RoundFile


class DeviceList:
    """Who may take part. Any thread."""

    def __init__(self, directory: Path) -> None:
        self._file = RoundFile(directory, "devices.state")
        self._lock = threading.Lock()
        state: dict[str, Any] = self._file.read() or {"devices": {}, "tokens": [], "revoked": []}
        self._devices: dict[str, bytes] = state["devices"]
        self._tokens: set[bytes] = set(state["tokens"])
        """Digests of secrets that were not used yet."""
        self._revoked: set[str] = set(state["revoked"])

    def add_token(self) -> bytes:
        """The secret of a new token."""
        secret = secrets.token_bytes(16)
        with self._lock:
            self._tokens.add(hashlib.sha256(secret).digest())
            self._keep()
        return secret

    def enrol(self, name: str, public: bytes, secret: bytes) -> None:
        """Take a device in, and its token out. Asking again with the same key is not a mistake: the answer was lost."""
        with self._lock:
            if self._devices.get(name) == public:
                return
            digest = hashlib.sha256(secret).digest()
            if digest not in self._tokens:
                raise InvalidArgument("the token was used before, or is not of this server")
            if name in self._devices:
                raise InvalidArgument(f"another device is enrolled as {name!r}")
            self._tokens.discard(digest)
            self._devices[name] = public
            self._keep()

    def revoke(self, name: str) -> None:
        """The device may not take part any more."""
        with self._lock:
            if name not in self._devices:
                raise InvalidArgument("no device of this name is enrolled", name=name)
            self._revoked.add(name)
            self._keep()

    def key_of(self, name: str) -> bytes:
        """The public key of a device that may take part."""
        with self._lock:
            if name in self._revoked:
                raise InvalidArgument(f"{name!r} was revoked")
            if name not in self._devices:
                raise InvalidArgument(f"{name!r} is not enrolled; it needs a token")
            return self._devices[name]

    def public_keys(self) -> dict[str, bytes]:
        """All devices that may take part, connected or not, with their public keys."""
        with self._lock:
            return {name: self._devices[name] for name in sorted(self._devices.keys() - self._revoked)}

    def _keep(self) -> None:
        self._file.write({"devices": self._devices, "tokens": sorted(self._tokens), "revoked": sorted(self._revoked)})
