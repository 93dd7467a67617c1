"""Certificates beside the token: who speaks to a service of a run shows one, and asks to be shown one (TLS both ways).

A folder holds three files in PEM, named as Kubernetes and cert-manager name them:

    ca.crt    the authority that all who belong to the run are signed by
    tls.crt   this side's certificate, with its chain: for every name it is dialed by, 127.0.0.1 for one
    tls.key   its key, of mode 0600, without a passphrase

Invariants
- A certificate says which machine this is, the token which run is meant: one never stands in for the other.
- What is wrong with one's own files is found before anything is started: they shake hands with themselves.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from rose.errors import ConfigError
from rose.small_file import SmallFile, read_small_file

AUTHORITY, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
_FILE_BYTES_MAX = 2**20
_ROUNDS_MAX = 8
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
class Certificates:
    """What a folder holds. Made by `read_certificates`."""

    folder: Path
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

    def server_credentials(self) -> grpc.ServerCredentials:
        pair = (self.key, self.certificate)
        return grpc.ssl_server_credentials([pair], self.authority, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def trouble(self) -> str:
        """What has become wrong with this side's certificate, to follow its name; "" if nothing."""
        try:
            _shake_hands(self.client_context(), self.server_context())
        except ssl.SSLCertVerificationError as error:
            return words(error)
        return ""

    def _context(self, protocol: int) -> ssl.SSLContext:
        """Raises OSError or ValueError for what is no PEM, or does not go together."""
        context = ssl.SSLContext(protocol)
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        # Without a passphrase, who starts a service would be asked for one, perhaps where nobody sits.
        context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, password="")
        return context


def read_certificates(folder: str) -> Certificates | None:
    """What `folder` holds; "" is none, and the token alone. Raises ConfigError for what no peer would accept."""
    if not folder:
        return None
    at = Path(folder).absolute()
    authority, certificate, key = (_read(at / name) for name in (AUTHORITY, CERTIFICATE, KEY))
    if key.mode & 0o077:
        raise ConfigError(f"{at / KEY}: mode {key.mode:04o}", expected="mode 0600", to_do=f"chmod 600 {at / KEY}")
    found = Certificates(at, authority.content, certificate.content, key.content)
    try:
        trouble = found.trouble()
    except (OSError, ValueError) as error:  # SSLError is an OSError
        mismatch = isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH"
        why = f"{KEY} is the key of another certificate" if mismatch else f"{error}"
        raise ConfigError(f"the certificates in {at} cannot be used: {why}", expected=_EXPECTED) from error
    if trouble:
        raise ConfigError(
            f"{at / CERTIFICATE} {trouble}",
            expected=f"a certificate that is valid now, signed by {AUTHORITY}",
            to_do=f"renew it; look with: openssl x509 -noout -text -in {at / CERTIFICATE}",
        )
    return found


def words(error: ssl.SSLCertVerificationError) -> str:
    """What is wrong with a certificate, to follow its name."""
    return _WORDS.get(error.verify_code, f"is not accepted: {error.verify_message}")


def bind(server: grpc.aio.Server, address: str, certificates: Certificates | None) -> int:
    """Have a service answer at HOST:PORT, port 0 for any; the port. Raises RuntimeError if it cannot be had."""
    if certificates is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, certificates.server_credentials())


def _read(file: Path) -> SmallFile:
    return read_small_file(file, _FILE_BYTES_MAX, _EXPECTED)


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
