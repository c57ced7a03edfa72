"""What a device remembers from round to round: SCAFFOLD's control variate, and the privacy that it has spent.

It never leaves the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from torsh_distributed.errors import ConfigurationError, InvalidArgument
from torsh_distributed.federated.privacy.client_privacy import LocalPrivacy
from torsh_distributed.federated.rounds.round_file import RoundFile


class ClientMemory:
    """The state after the last update that counted, and the one that holds if the update after it counts, too.

    Why two: only the server knows which updates became part of the model, and says so with the next work.
    """

    def __init__(self, directory: Path) -> None:
        self._file = RoundFile(directory, "client.state").held()
        self._private = RoundFile(directory, "privacy.state")

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

    def count_private(self, privacy: LocalPrivacy) -> None:
        """An update with this noise is about to leave the device. ConfigurationError if its budget is spent.

        The server counts, too; that it does so is nothing that a device may have to rely on.
        """
        noise = repr((privacy.clip_norm, privacy.noise_multiplier, privacy.delta))
        spent = self._private.read() or {"noise": noise, "num_updates": 0}
        if spent["noise"] != noise:
            raise ConfigurationError(
                "this device has sent updates with other noise, whose ε does not add up with that of these",
                hint="join from another directory: its budget is a new one",
            )
        if spent["num_updates"] >= privacy.most_rounds():
            raise ConfigurationError(f"this device has spent its budget of ε = {privacy.budget:g}")
        self._private.write({"noise": noise, "num_updates": spent["num_updates"] + 1})

    def _read(self) -> list[dict[str, Any]]:
        known = self._file.read()
        return [] if known is None else list(known["states"])
