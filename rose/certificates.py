"""Certificates beside the token: who speaks to a service of a run shows one, and asks to be shown one (TLS both ways).

Invariants
- A certificate says which machine this is, the token which run is meant: one never stands in for the other.
- Files that were renewed are for connections that are made from then on; those that are open stay as they are.
- What is renewed takes the old one's place whole and checked, as at the start. What cannot be used, such as a
  certificate whose key is still on its way, changes nothing; the log says so, once.
"""

from __future__ import annotations

import os
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from rose.errors import ConfigError
from rose.logs import logger
from rose.tls_identity import AUTHORITY, CERTIFICATE, KEY, TlsIdentity, read_identity

LOOK_EVERY_S = 2.0
"""At the files, at most, however many connections come."""

log = logger("certificates")

_Stamp = tuple[tuple[int, int, int], ...]


class Certificates:
    """What a folder holds, now. Made by `read_certificates`; from any thread."""

    def __init__(self, folder: Path, identity: TlsIdentity, stamp: _Stamp = ()) -> None:
        self._folder = folder
        self._held = (identity, identity.server_context())
        self._stamp = stamp
        self._looked_s = time.monotonic()
        self._told = ""
        self._lock = threading.Lock()

    @property
    def identity(self) -> TlsIdentity:
        """For the next connection. The same object as before, unless the files were renewed."""
        return self._now()[0]

    def server_context(self) -> ssl.SSLContext:
        """For the next connection to a server of bytes; see `TlsIdentity`."""
        return self._now()[1]

    def client_context(self) -> ssl.SSLContext:
        """For the next connection of a client of bytes; see `TlsIdentity`."""
        return self.identity.client_context()

    def server_credentials(self) -> grpc.ServerCredentials:
        """For all connections to a gRPC server: it asks anew for each."""
        shown = self.identity

        def renewed() -> Any:  # None where nothing is new, which the types do not know
            nonlocal shown
            now = self.identity
            if now is shown:
                return None
            shown = now
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(_configuration(shown), renewed, require_client_authentication=True)

    def _now(self) -> tuple[TlsIdentity, ssl.SSLContext]:
        with self._lock:
            if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
                self._look()
                self._looked_s = time.monotonic()
            return self._held

    def _look(self) -> None:
        """One that was refused is looked at again even if it stays as it is: it may only have been made too early."""
        stamp = _stamp(self._folder)
        if stamp == self._stamp:
            return
        try:
            identity = read_identity(self._folder)
            held = (identity, identity.server_context())
        except (ConfigError, OSError) as error:
            if str(error) != self._told:
                log.warning("the renewed certificates are not taken; the old ones stay", why=str(error))
            self._told = str(error)
            return
        if identity != self._held[0]:
            self._held = held
            log.info("the certificates were renewed", folder=str(self._folder))
        self._stamp, self._told = stamp, ""


def read_certificates(folder: str) -> Certificates | None:
    """What `folder` holds; "" is none, and the token alone. Raises ConfigError for what no peer would accept."""
    if not folder:
        return None
    at = Path(folder).absolute()
    stamp = _stamp(at)
    return Certificates(at, read_identity(at), stamp)


def bind(server: grpc.aio.Server, address: str, certificates: Certificates | None) -> int:
    """Have a service answer at HOST:PORT, port 0 for any; the port. Raises RuntimeError if it cannot be had."""
    if certificates is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, certificates.server_credentials())


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    pair = (identity.key, identity.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=identity.authority)


def _stamp(folder: Path) -> _Stamp:
    """Taken before the files are read: what is renewed meanwhile shows at the next look."""
    found = []
    for name in (AUTHORITY, CERTIFICATE, KEY):
        try:
            state = os.stat(folder / name)
        except (OSError, ValueError):
            return ()  # that it is missing, who reads it says
        found.append((state.st_ino, state.st_size, state.st_mtime_ns))
    return tuple(found)
