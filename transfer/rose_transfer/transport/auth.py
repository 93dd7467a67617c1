"""Both sides prove that they know the token without sending it.

Each side draws 32 random bytes for the connection; a proof is HMAC-SHA-256, keyed with the token, over the prover's
role and both draws (RFC 2104). A proof that was overheard is of no use on another connection or in the other role.
It shows who was there when the connection began, no more: against somebody who can change packets, use TLS too.
"""

from __future__ import annotations

import hmac

from rose.errors import ConfigError

TOKEN_BYTES_MIN = 16
MARK_BYTES = 16


def checked_token(token: str) -> bytes:
    """The token as a key. Raises ConfigError if it is too short to be a secret; the message does not hold it."""
    key = token.encode()
    if len(key) < TOKEN_BYTES_MIN:
        raise ConfigError(
            f"the transfer token has {len(key)} bytes",
            expected=f"{TOKEN_BYTES_MIN} or more",
            to_do="draw one with: openssl rand -hex 32",
        )
    return key


def client_proof(token: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(token, b"rose transfer client" + server_nonce + client_nonce, "sha256")


def server_proof(token: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(token, b"rose transfer server" + server_nonce + client_nonce, "sha256")


def same(proof: bytes, expected: bytes) -> bool:
    """Compare in a time that does not depend on where they differ."""
    return hmac.compare_digest(proof, expected)


def derived_nonce(seed: bytes, number: int) -> bytes:
    """32 bytes that nobody without the seed can foretell: the mark of the seed, then others for each number."""
    own = hmac.digest(seed, b"rose transfer mark", "sha256")[:MARK_BYTES]
    return own + hmac.digest(seed, b"rose transfer nonce" + number.to_bytes(8, "little"), "sha256")[MARK_BYTES:]


def mark_of(client_nonce: bytes) -> bytes:
    """What tells a client's connections from those of others."""
    return client_nonce[:MARK_BYTES]
