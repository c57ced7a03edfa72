"""Which backends keep a job's promise to encrypt what leaves a node; the others are refused, never used in clear."""

from __future__ import annotations

from torsh_distributed.comm.trust.job_tls import find_tls
from torsh_distributed.errors import FeatureNotAvailable

_ENCRYPTED = ("torsh", "shm")
"""torsh encrypts between nodes, shm does not leave one."""


def require_encryption(backend: str) -> None:
    """Raise FeatureNotAvailable if the job is under TLS and this backend would send in the clear between its nodes."""
    if find_tls() is None:
        return
    plain = [name for part in backend.split(",") if (name := part.split(":")[-1].strip()) not in _ENCRYPTED]
    if plain:
        raise FeatureNotAvailable(
            f"this job is under TLS, and {' and '.join(plain)} cannot encrypt what goes between nodes",
            hint="use backend='torsh', or leave out --tls and encrypt the network itself (WireGuard, IPsec)",
            backend=backend,
        )


def background_backend() -> str:
    """The backend for small groups beside training: gloo, whose threads wait for nobody; torsh where gloo is plain."""
    return "gloo" if find_tls() is None else "torsh"
