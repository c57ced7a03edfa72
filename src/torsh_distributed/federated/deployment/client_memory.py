"""What a device remembers from round to round, such as SCAFFOLD's control variate. It never leaves the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated.rounds.round_file import RoundFile


class ClientMemory:
    """The state after the last update that counted, and the one that holds if the update after it counts, too.

    Why two: only the server knows which updates became part of the model, and says so with the next work.
    """

    def __init__(self, directory: Path) -> None:
        self._file = RoundFile(directory, "client.state")

    def state_after(self, counted: bytes) -> Mapping[str, Tensor]:
        """The state behind the update with this nonce; empty if none has counted."""
        if not counted:
            return {}
        for known in self._read():
            if known["nonce"] == counted:
                self._file.write({"states": [known]})
                state: dict[str, Tensor] = known["state"]
                return state
        raise InvalidArgument(
            "this device does not have what it remembered after its last update that counted",
            hint="restore its directory, or enrol it under another name",
        )

    def remember(self, nonce: bytes, state: Mapping[str, Tensor]) -> None:
        """`state` holds if the update with this nonce counts; on the disk when this returns."""
        self._file.write({"states": [*self._read()[:1], {"nonce": nonce, "state": dict(state)}]})

    def _read(self) -> list[dict[str, Any]]:
        known = self._file.read()
        return [] if known is None else list(known["states"])
