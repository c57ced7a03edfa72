"""`--port-range`: the ports that a job listens on, limited for firewalls."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torsh_distributed.errors import FeatureNotAvailable, InvalidArgument
from torsh_distributed.native import PORT_LIMIT

RANGE_VARIABLE = "TORSH_PORT_RANGE"
_PRELOAD = "LD_PRELOAD"


def require_port_limit() -> None:
    """Raise FeatureNotAvailable if the sockets of torch's backends could not be kept in a range."""
    if not PORT_LIMIT.target.exists():
        raise FeatureNotAvailable(
            "--port-range needs the compiled library that limits the ports of torch's backends, which was not built",
            hint="install a C compiler and Python's headers, then `python -m torsh_distributed.native`",
            library=str(PORT_LIMIT.target),
        )
    if not can_be_preloaded(str(PORT_LIMIT.target)):
        raise FeatureNotAvailable(
            f"--port-range needs a library in {_PRELOAD}, which takes no path with a space or a colon",
            hint="install torsh-distributed in a directory whose path has neither",
            library=str(PORT_LIMIT.target),
        )


def can_be_preloaded(path: str) -> bool:
    """Whether the dynamic linker takes this path: it splits what it is told to load at spaces and colons."""
    return not any(character.isspace() or character == ":" for character in path)


def port_variables(ports: tuple[int, int], base: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep the TCP sockets which a process opens on any port within the range, those of gloo too."""
    library = str(PORT_LIMIT.target)
    loaded = [part for part in base.get(_PRELOAD, "").split(":") if part and part != library]
    return {RANGE_VARIABLE: f"{ports[0]}-{ports[1]}", _PRELOAD: os.pathsep.join((library, *loaded))}


def meeting_variables(ports: tuple[int, int], base: Mapping[str, str]) -> dict[str, str]:
    """`port_variables` for a job without our launcher, with MASTER_PORT: the first port, where the ranks meet.

    The others get the rest of the range: the engine's own program, which listens under the same limit, would else take
    the first port at times.
    """
    first, last = ports
    if last <= first:
        raise InvalidArgument("a range of ports needs two or more", got=f"{first}-{last}")
    return {"MASTER_PORT": str(first), **port_variables((first + 1, last), base)}
