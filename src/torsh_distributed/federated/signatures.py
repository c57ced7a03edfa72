"""Whether a device's key signed a message: Ed25519, from the extra `federated`."""

from __future__ import annotations

from typing import Any

from torsh_distributed.errors import missing_extra


def is_signed_by(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the key's owner signed the message."""
    library = ed25519_library()
    from cryptography.exceptions import InvalidSignature

    try:
        library.Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def ed25519_library() -> Any:
    """The package; the error names the extra."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise missing_extra("federated", "the identity of devices") from error
    return ed25519
