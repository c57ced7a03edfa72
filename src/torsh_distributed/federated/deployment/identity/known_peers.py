"""The other devices that a device shares secrets with, by name and public key.

Why: in secure aggregation a server that makes up devices learns the sum of the few real ones. From a list that the
owner wrote, it cannot. Without one, each device is known as it was first seen, and one that changes is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated.rounds.round_file import RoundFile

_KEY_BYTES = 32


class KnownPeers:
    """Kept in the device's directory."""

    def __init__(self, directory: Path, listed: Mapping[str, bytes] | None) -> None:
        """`listed`: all devices that may take part; None: those that are first seen."""
        self._file = RoundFile(directory, "peers.state")
        self._listed = listed

    def unknown(self, shown: Mapping[str, bytes]) -> list[str]:
        """The names that are not those of the devices with these keys. Remembers new ones if there is no list."""
        seen: dict[str, bytes] = {} if self._listed is not None else (self._file.read() or {})
        known = {**shown, **seen} if self._listed is None else self._listed
        odd = [name for name, key in shown.items() if known.get(name) != key]
        if self._listed is None and not odd and known != seen:
            self._file.write(dict(known))
        return odd


def peer_line(name: str, public: bytes) -> str:
    """A device's line in a list of peers."""
    return f"{name} {public.hex()}"


def read_peers(path: Path) -> dict[str, bytes]:
    """A file with a line for each device, as `torsh federated key` prints it."""
    peers = {}
    for line in path.read_text().splitlines():
        name, _, text = line.strip().rpartition(" ")
        if not line.strip():
            continue
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if not name or len(key) != _KEY_BYTES:
            raise InvalidArgument(
                "a line of the list of peers is not a name and a key",
                hint="put together what `torsh federated key` prints on each device",
                line=line[:100],
            )
        peers[name] = key
    return peers
