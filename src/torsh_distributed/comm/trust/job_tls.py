"""TLS between the nodes of a job: certificates that the job's secret vouches for, or the user's own.

Why no authority is needed: after the TLS handshake both ends prove the job's secret (see `handshake`) under a key that
is bound to the server's certificate. Whoever sits in between has another certificate, so his proof and theirs do not
fit. A node makes its certificate when the job starts, with the `openssl` command, and it is gone with the job. A user's
own certificates are used the same way; with an authority (`--tls-ca`) each end also checks the other's against it.

Imports `ssl` in functions only: launchers without TLS do not wait for it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torsh_distributed.errors import ConfigurationError, FeatureNotAvailable, IoError

if TYPE_CHECKING:
    import ssl


CERTIFICATE_VARIABLE, KEY_VARIABLE, AUTHORITY_VARIABLE = "TORSH_TLS_CERT", "TORSH_TLS_KEY", "TORSH_TLS_CA"
_OPENSSL_TIMEOUT_S = 30.0
_DAYS = "30"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTls:
    """The files of one node."""

    certificate: Path
    key: Path
    authority: Path | None = None
    """Who must have signed the other end's certificate; None trusts the job's secret alone."""

    def variables(self) -> dict[str, str]:
        """What tells workers, and the store's process, to use it."""
        found = {CERTIFICATE_VARIABLE: str(self.certificate), KEY_VARIABLE: str(self.key)}
        return found if self.authority is None else {**found, AUTHORITY_VARIABLE: str(self.authority)}

    def server_context(self) -> ssl.SSLContext:
        """For the end that was connected to. Made once: a stranger's connection must cost no reading of files."""
        return _server_context(self)

    def client_context(self) -> ssl.SSLContext:
        """For the end that connects."""
        return _client_context(self)

    def own_digest(self) -> bytes:
        """Of the certificate that this node shows."""
        return _own_digest(self)


@functools.cache
def _server_context(tls: JobTls) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A ticket would arrive unasked on connections whose silence means that they are idle.
    context.num_tickets = 0
    return _loaded(context, tls)


@functools.cache
def _client_context(tls: JobTls) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nodes are known by the job's secret, not by their names, which a certificate made in advance cannot have.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _loaded(context, tls)


@functools.cache
def _own_digest(tls: JobTls) -> bytes:
    import ssl

    try:
        first = tls.certificate.read_text().partition("-----END CERTIFICATE-----")
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert((first[0] + first[1]).strip())).digest()
    except (OSError, ValueError) as error:
        raise _unusable(tls, error) from error


def _loaded(context: ssl.SSLContext, tls: JobTls) -> ssl.SSLContext:
    import ssl

    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.authority is not None:
            context.load_verify_locations(tls.authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise _unusable(tls, error) from error
    return context


def find_tls(environ: Mapping[str, str] | None = None) -> JobTls | None:
    """What the launcher of this process asked for; None for connections that are signed, not encrypted."""
    environ = os.environ if environ is None else environ
    certificate, key = environ.get(CERTIFICATE_VARIABLE), environ.get(KEY_VARIABLE)
    if not certificate and not key:
        return None
    if not certificate or not key:
        raise ConfigurationError(f"{CERTIFICATE_VARIABLE} and {KEY_VARIABLE} belong together")
    authority = environ.get(AUTHORITY_VARIABLE)
    return JobTls(certificate=Path(certificate), key=Path(key), authority=None if not authority else Path(authority))


def plain_transports_off(tls: JobTls) -> dict[str, str]:
    """Variables with which torch's own backends encrypt between nodes or fail, also in scripts that know only torch.

    gloo then wants its TLS transport, which torch's wheels are built without; with one that has it, it checks the other
    end against the authority. NCCL has no encryption: it is told to use a network that it does not have.
    """
    found = {"GLOO_DEVICE_TRANSPORT": "TCP_TLS", "NCCL_NET": "none-with-tls"}
    if tls.authority is not None:
        transport = "GLOO_DEVICE_TRANSPORT_TCP_TLS"
        found |= {f"{transport}_PKEY": str(tls.key), f"{transport}_CERT": str(tls.certificate)}
        found[f"{transport}_CA_FILE"] = str(tls.authority)
    return found


def bound_secret(secret: bytes, certificate_digest: bytes) -> bytes:
    """The secret for a proof that holds on a connection to this certificate alone."""
    return hmac.digest(secret, b"over TLS to " + certificate_digest, "sha256")


def make_certificate(directory: Path) -> JobTls:
    """A new key and a certificate for it in a private directory, for the length of the job."""
    program = shutil.which("openssl")
    if program is None:
        raise FeatureNotAvailable(
            "--tls makes a certificate with the `openssl` command, which is not on the PATH",
            hint="install openssl, or give certificates of your own: --tls-cert and --tls-key",
        )
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", _DAYS, "-subj", "/CN=torsh job", "-keyout", str(key), "-out", str(certificate)]
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_OPENSSL_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
        key.chmod(0o600)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise IoError(
            f"no certificate could be made for --tls: {said[-300:]}",
            hint="give certificates of your own: --tls-cert and --tls-key",
        ) from error
    return JobTls(certificate=certificate, key=key)


def _unusable(tls: JobTls, error: Exception) -> IoError:
    return IoError(
        f"the certificate or key for TLS cannot be used: {getattr(error, 'strerror', None) or error}",
        hint="--tls-cert and --tls-key are files in PEM that belong together; --tls-ca is the authority's certificate",
        certificate=str(tls.certificate),
        key=str(tls.key),
    )


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
