"""What one side of a connection shows of itself over TLS, and whom it believes: both are always there.

A folder holds three files in PEM, named as Kubernetes and cert-manager name them:

    ca.crt    the authority that all who belong to the run are signed by
    tls.crt   this side's certificate, with its chain: for every name it is dialed by, 127.0.0.1 for one
    tls.key   its key, of mode 0600, without a passphrase

Invariants
- What was looked at is what is shown: after it was read, nobody goes back to the files.
- What is wrong with it is found before anybody is spoken to: it shakes hands with itself.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rose.errors import ConfigError
from rose.small_file import SmallFile, read_small_file

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_FILE_BYTES_MAX = 2**20
_ROUNDS_MAX = 8
# The second for a key of another kind, as of RSA to a certificate of an elliptic curve.
_MISMATCH = frozenset({"KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
_EXPECTED = f"a folder with {AUTHORITY}, {CERTIFICATE} and {KEY} in PEM"
# OpenSSL's numbers, X509_V_ERR_*: what it calls them does not say whose mistake it is.
_WORDS = {
    9: "is not valid yet; compare the clocks",
    10: "has expired",
    18: "is signed by no authority but itself",
    19: "is signed by another authority",
    20: "is signed by another authority",
    21: "is signed by another authority",
    26: "is not made for both ends of a connection (extendedKeyUsage serverAuth, clientAuth)",
    62: "is for another name",
    64: "is for another address",
}


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Made by `read_identity`."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def server_context(self) -> ssl.SSLContext:
        """For a server of bytes, that asks whoever comes for a certificate."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """For a client of bytes; the server's certificate must be for the name that is dialed."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def trouble(self) -> str:
        """Why no peer would accept this side's certificate now, to follow its name; "" if one would."""
        try:
            _shake_hands(self.client_context(), self.server_context())
        except ssl.SSLCertVerificationError as error:
            return words(error)
        return ""

    def _context(self, protocol: int) -> ssl.SSLContext:
        """Raises OSError, which SSLError is one of, for what is no PEM, or does not go together."""
        context = ssl.SSLContext(protocol)
        # Not as text: around what is PEM a file may say anything, in any letters.
        with (
            _file_of(self.authority) as authority,
            _file_of(self.certificate) as certificate,
            _file_of(self.key) as key,
        ):
            context.load_verify_locations(authority)
            # Without a passphrase, who starts a service would be asked for one, perhaps where nobody sits.
            context.load_cert_chain(certificate, key, password="")
        return context


def read_identity(folder: Path) -> TlsIdentity:
    """Raises ConfigError for what no peer would accept."""
    authority, certificate, key = (_read(folder / name) for name in (AUTHORITY, CERTIFICATE, KEY))
    if key.mode & 0o077:
        file = folder / KEY
        raise ConfigError(f"{file}: mode {key.mode:04o}", expected="mode 0600", to_do=f"chmod 600 {file}")
    found = TlsIdentity(authority.content, certificate.content, key.content)
    try:
        trouble = found.trouble()
    except OSError as error:
        raise _unusable(folder, found, error) from error
    if trouble:
        raise ConfigError(
            f"{folder / CERTIFICATE} {trouble}",
            expected=f"a certificate that is valid now, signed by {AUTHORITY}",
            to_do=f"renew it; look with: openssl x509 -noout -text -in {folder / CERTIFICATE}",
        )
    return found


def words(error: ssl.SSLCertVerificationError) -> str:
    """What is wrong with a certificate, to follow its name."""
    return _WORDS.get(error.verify_code, f"is not accepted: {error.verify_message}")


def _unusable(folder: Path, found: TlsIdentity, error: OSError) -> ConfigError:
    """What could not be made a context of: the library names no file, and seldom a reason."""
    reason = getattr(error, "reason", None)
    for name, content in ((AUTHORITY, found.authority), (CERTIFICATE, found.certificate)):
        if not _holds_certificates(content):
            return ConfigError(
                f"{folder / name} holds no certificate that can be read",
                expected=_EXPECTED,
                to_do=f"look with: openssl x509 -noout -text -in {folder / name}",
            )
    key = folder / KEY
    if reason in _MISMATCH:
        return ConfigError(f"{key} is the key of another certificate", expected=_EXPECTED)
    if reason is None and b"ENCRYPTED" in found.key:
        return ConfigError(
            f"{key} is locked with a passphrase",
            expected="a key without one, which a service can read where nobody sits",
            to_do=f"unlock it with: (umask 077; openssl pkey -in {key} -out NEW), and put NEW in its place",
        )
    if reason is None:
        to_do = f"look with: openssl pkey -noout -in {key}"
        return ConfigError(f"{key} holds no key that can be read", expected=_EXPECTED, to_do=to_do)
    return ConfigError(f"the certificates in {folder} cannot be used: {error}", expected=_EXPECTED)


def _holds_certificates(content: bytes) -> bool:
    with _file_of(content) as file:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        except ssl.SSLError:
            return False
    return True


def _read(file: Path) -> SmallFile:
    return read_small_file(file, _FILE_BYTES_MAX, _EXPECTED)


@contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """The path of a file in memory: the standard library takes a certificate of its own from files alone."""
    descriptor = os.memfd_create("pem")
    with open(descriptor, "wb", buffering=0) as file:
        file.write(content)
        yield f"/proc/self/fd/{descriptor}"


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Between two ends in memory. Raises SSLError for what either of them does not accept."""
    client.check_hostname = False  # a certificate does not know by which of its names it will be dialed
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(_ROUNDS_MAX):
        for end in tuple(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass
        if not ends:
            return
    raise ssl.SSLError("the handshake with itself does not end")
