"""What carries the data of the `torsh` backend between nodes: a choice of the site, not of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torsh_distributed import known_variables
from torsh_distributed.comm.trust.job_tls import find_tls
from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable

Leg = Literal["gloo", "mpi"]
LEG_VARIABLE = "TORSH_BETWEEN_NODES"


def chosen_leg(option: Leg | None, environ: Mapping[str, str]) -> Leg:
    """The option, else the variable, else gloo; raises for what is neither, and for MPI in a job under TLS."""
    leg = option or known_variables.text(LEG_VARIABLE, environ)
    if leg == "gloo":
        return "gloo"
    if leg != "mpi":
        raise ConfigurationError(f"{LEG_VARIABLE} must be gloo or mpi", hint="set one of them, or unset it", value=leg)
    if find_tls(environ) is not None:
        raise FeatureNotAvailable(
            "this job is under TLS, and MPI cannot encrypt what goes between nodes",
            hint=f"unset {LEG_VARIABLE}, or leave out --tls and encrypt the network itself (WireGuard, IPsec)",
        )
    return "mpi"
