"""Keys of servers and devices: Ed25519, made once and kept in a file that only this user can read.

A device knows its server by the digest of the server's certificate, which is part of the enrolment token. The server
knows a device by its public key. Neither relies on a name or an address.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torsh_distributed.errors import InvalidArgument
from torsh_distributed.federated.signatures import ed25519_library
from torsh_distributed.private_files import open_private

_PREFIX = "torsh-"
_SECRET_BYTES, _DIGEST_BYTES = 16, 32
_DAYS = 3650


@dataclass(frozen=True, slots=True)
class EnrolmentToken:
    """Lets one device enrol, once: a secret, and the certificate of the server that it is for."""

    secret: bytes
    server_digest: bytes

    def text(self) -> str:
        """To hand to a device."""
        return _PREFIX + base64.urlsafe_b64encode(self.secret + self.server_digest).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> EnrolmentToken:
        """The token that `text` made."""
        body = text.strip().removeprefix(_PREFIX)
        try:
            data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        except ValueError:
            data = b""
        if len(data) != _SECRET_BYTES + _DIGEST_BYTES:
            raise InvalidArgument("this is not an enrolment token", hint="copy the line that the server printed")
        return cls(data[:_SECRET_BYTES], data[_SECRET_BYTES:])


class DeviceKey:
    """A private key, and what it signs."""

    def __init__(self, key: Any) -> None:
        self._key = key
        self.public = key.public_key().public_bytes_raw()

    @classmethod
    def load_or_make(cls, path: Path) -> DeviceKey:
        """The key in the file; the first call makes it."""
        private = ed25519_library().Ed25519PrivateKey
        with os.fdopen(open_private(path, os.O_RDWR), "r+b") as file:
            data = file.read()
            if not data:
                data = private.generate().private_bytes_raw()
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        return cls(private.from_private_bytes(data))

    def sign(self, message: bytes) -> bytes:
        """64 bytes that only this key can make."""
        signature: bytes = self._key.sign(message)
        return signature

    def certificate(self) -> bytes:
        """A self-signed certificate in PEM, with the private key behind it."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "torsh federated server")])
        begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        # The same key gives the same certificate, byte by byte: devices know it by its digest.
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(self._key.public_key())
        builder = builder.serial_number(1).not_valid_before(begin)
        made = builder.not_valid_after(begin + datetime.timedelta(days=_DAYS)).sign(self._key, None)
        pem = serialization.Encoding.PEM
        private = self._key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        text: bytes = made.public_bytes(pem) + private
        return text


def server_context(directory: Path, key: DeviceKey) -> tuple[ssl.SSLContext, bytes]:
    """TLS for a server, and the digest of the certificate it shows."""
    path = directory / "certificate.pem"
    text = key.certificate()
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(text)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.load_cert_chain(path)
    first = text.decode().partition("-----END CERTIFICATE-----")
    return context, hashlib.sha256(ssl.PEM_cert_to_DER_cert((first[0] + first[1]).strip())).digest()


def client_context() -> ssl.SSLContext:
    """TLS for a device, which then compares the certificate's digest itself."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
