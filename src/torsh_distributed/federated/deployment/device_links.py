"""What a device's link changes: the codec of its updates, the deadline of its round, and whether it is asked at all."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from torsh_distributed.errors import ConfigurationError
from torsh_distributed.federated.client_selection import ClientFacts
from torsh_distributed.federated.vector_codec import require_upload_method

_BYTES_PER_MBIT = 125_000
_ANSWER_S = 2.0
_METERED = ("u 1", "u 3")
"""NetworkManager's yes, and its guess that it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAdaptation:
    """Of a server; what it goes by is measured with each upload of 64 KB or more, and with each answer."""

    slow_mbps: float = 10.0
    """A device whose last upload was slower (Mbit/s) sends by `slow_upload`."""

    slow_upload: str = "int8"
    """The codec of slow devices' updates, such as topk:0.05."""

    deadline_factor: float | None = 5.0
    """A round whose devices were all measured waits so many times as long as the slowest of them took last, at most the
    server's deadline; None: always until that."""

    uses_metered: bool = False
    """Whether devices on metered links are asked."""

    def __post_init__(self) -> None:
        require_upload_method(self.slow_upload)
        if not self.slow_mbps >= 0:
            raise ConfigurationError("slow_mbps must not be negative", slow_mbps=self.slow_mbps)
        if self.deadline_factor is not None and not self.deadline_factor > 1:
            raise ConfigurationError(
                "deadline_factor must be above 1: devices may take as long as the last time",
                deadline_factor=self.deadline_factor,
            )

    def upload_of(self, facts: ClientFacts, usual: str) -> str:
        """The codec of a device's update."""
        rate = facts.bytes_per_s
        return self.slow_upload if rate is not None and rate < self.slow_mbps * _BYTES_PER_MBIT else usual

    def deadline_s(self, chosen: Iterable[ClientFacts], most_s: float) -> float:
        """How long a round with these devices waits."""
        took_s = [facts.turn_s for facts in chosen]
        measured = [one for one in took_s if one is not None]
        if self.deadline_factor is None or not measured or len(measured) < len(took_s):
            return most_s
        return min(most_s, self.deadline_factor * max(measured))


def network_is_metered() -> bool:
    """What NetworkManager says of this machine's connection; False where there is none to ask."""
    busctl = shutil.which("busctl")
    if busctl is None:
        return False
    name = "org.freedesktop.NetworkManager"
    command = [busctl, "get-property", name, "/" + name.replace(".", "/"), name, "Metered"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # a bus that does not answer knows of no link
    return answer.stdout.strip() in _METERED
