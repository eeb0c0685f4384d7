"""TLS of both sides, and what is wrong when two sides do not come together."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import certifi

from tierkit.access.files import check_private
from tierkit.errors import SetupError

__all__ = ["ServerTls", "client_context", "tls_trouble", "trust_further"]

_KEY_FORBIDDEN = 0o027
"""Mode bits of a private key: its owner and group may read it (as distributions keep keys for services)."""

_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})
"""OpenSSL's reasons for errors about bytes that are not TLS."""


class ServerTls:
    """Certificate and key of a service, and the TLS context made from them.

    Args:
        cert: PEM, the service's certificate first, then its authorities' certificates.
        key: PEM, without a password; None if `cert` holds it.

    Raises:
        SetupError: a file cannot be read or used, or others may read the key.
    """

    def __init__(self, cert: Path, key: Path | None) -> None:
        self.paths = (cert,) if key is None else (cert, key)
        self.context = _server_context()
        self.load()

    def load(self) -> None:
        """Read the files again; connections made from now on use them.

        Raises:
            SetupError: they cannot be used; what was read before still holds.
        """
        # Into another context first: a certificate whose key has yet to be replaced would spoil the one in use.
        for context in (_server_context(), self.context):
            _load(context, self.paths[0], self.paths[-1])


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _load(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    try:
        check_private(key.stat(), key, "the TLS key", forbidden=_KEY_FORBIDDEN)
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as exc:
        if exc.reason == "KEY_VALUES_MISMATCH":
            raise SetupError(f"the TLS key {key} does not belong to the certificate {cert}") from exc
        raise SetupError(f"the TLS certificate {cert} or its key {key} is not a usable PEM file") from exc
    except OSError as exc:
        raise SetupError(f"cannot read the TLS certificate {cert} or its key {key}: {exc.strerror}") from exc


def _no_password() -> str:
    # Without this OpenSSL would ask the terminal.
    raise SetupError("the TLS key is encrypted: store it without a password, in a file that only the service can read")


@cache
def client_context(authority: Path | None = None, *, http: bool = True) -> ssl.SSLContext:
    """Return the TLS context for connections to services: it verifies their certificates, host name included.

    Made once per process and file, because reading the usual store takes about 30 ms and 3 MB.

    Args:
        authority: PEM with the certificates to trust instead of the usual public ones.
        http: True if the service speaks HTTP.

    Raises:
        SetupError: it cannot be read.
    """
    with _reading(authority):
        context = ssl.create_default_context(cafile=authority or certifi.where())
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if http:
        context.set_alpn_protocols(["http/1.1"])
    return context


def trust_further(authority: Path) -> None:
    """Read the file again: users of its `client_context` trust added certificates from the next connection on. Removed
    certificates stay trusted by this process, because OpenSSL cannot forget a certificate.

    Raises:
        SetupError: it cannot be read; the certificates read before stay trusted.
    """
    with _reading(authority):
        client_context(authority).load_verify_locations(authority)


@contextmanager
def _reading(authority: Path | None) -> Iterator[None]:
    try:
        yield
    except ssl.SSLError as exc:
        raise SetupError(f"{authority} holds no certificate (PEM) to trust") from exc
    except OSError as exc:
        raise SetupError(f"cannot read the certificates to trust, {authority}: {exc.strerror}") from exc


def tls_trouble(error: BaseException, peer: str) -> str | None:
    """A sentence on why no TLS connection came about, and what helps; None if `error` is about something else.

    Args:
        error: with its causes.
        peer: who was called, such as "the scheduler at https://10.0.0.5:8070".
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _distrust(cause, peer)
    if cause.reason in _NOT_TLS:
        return f"{peer} does not speak TLS: write http:// in its URL, or start it with --tls-cert and --tls-key"
    return f"no TLS connection to {peer}: {(cause.reason or str(cause)).replace('_', ' ').lower()}"


_DISTRUST = {
    9: "is not valid yet: look at the clocks here and there",
    10: "has expired: renew it there (and look at the clock here)",
    18: "is self-signed or comes from an authority of your own: name that certificate with --tls-ca",
    62: "is for another host: call it by a name that the certificate has (a node tells its own with --advertise-url), "
    "or make one with this name or address",
}
_DISTRUST |= {19: _DISTRUST[18], 64: _DISTRUST[62]}
"""Sentences by OpenSSL's codes, X509_V_ERR_..."""


def _distrust(error: ssl.SSLCertVerificationError, peer: str) -> str:
    unknown = (
        f"is signed by no authority that is trusted here ({error.verify_message}): name its authority with --tls-ca"
    )
    return f"the certificate of {peer} {_DISTRUST.get(error.verify_code, unknown)}"
