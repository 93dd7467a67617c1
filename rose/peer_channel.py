"""The channel to one service at HOST:PORT, and how it is connected anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from rose.certificates import Certificates

CONNECT_S = 5.0
"""What one attempt to connect may take: handshakes of TLS cross slow links, and beside 16 busy processes on 2 cores one
was seen to take 64 ms where it takes 1 ms alone. An attempt with less is not late, it never succeeds."""

# gRPC names the first for pauses, but it is the time of an attempt. A peer that has just been started may come up at
# any moment: that is looked for soon, not in seconds.
RECONNECT = (
    ("grpc.min_reconnect_backoff_ms", round(CONNECT_S * 1000)),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 200),
    # Without it a closed channel's pauses would be the next one's.
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(
    address: str, certificates: Certificates | None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    options = (*RECONNECT, *options)
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, certificates.channel_credentials(), options=options)
