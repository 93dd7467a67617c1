"""The channel to one service at HOST:PORT, and how it is connected anew.

Invariants
- gRPC knows the certificates of a channel as they were when it was made. So once they were renewed, and the connection
  was lost, another channel takes its place, and calls are made on that one.
- Calls that are under way on the old channel have their own time to end in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
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


class PeerChannel:
    """`make_stub` is that of the service; no call on its stub takes longer than `call_s`, or it may be cut."""

    def __init__(
        self,
        address: str,
        certificates: Certificates | None,
        make_stub: Callable[[grpc.aio.Channel], Any],
        call_s: float,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._address = address
        self._certificates = certificates
        self._make_stub = make_stub
        self._call_s = call_s
        self._options = (*RECONNECT, *options)
        self._closing: dict[asyncio.Task[None], grpc.aio.Channel] = {}
        self._open()

    def renew(self) -> bool:
        """After a call that was not delivered: whether there is another `stub` now, which shows other certificates."""
        if self._certificates is None or self._certificates.identity is self._identity:
            return False
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            return False  # the next attempt was accepted as it is
        old = self._channel
        self._open()
        closing = asyncio.create_task(_closed(old, self._call_s), name="an old channel's last calls")
        self._closing[closing] = old
        closing.add_done_callback(self._closing.pop)
        return True

    async def close(self) -> None:
        """Cut every call that is under way."""
        closing, channels = tuple(self._closing), (*self._closing.values(), self._channel)
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for channel in channels:  # a task that was cancelled before it began has closed nothing
            await channel.close()

    def _open(self) -> None:
        if self._certificates is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
        else:
            self._identity = self._certificates.identity
            one = self._identity
            credentials = grpc.ssl_channel_credentials(one.authority, one.key, one.certificate)
            self._channel = grpc.aio.secure_channel(self._address, credentials, options=self._options)
        self.stub = self._make_stub(self._channel)


async def _closed(channel: grpc.aio.Channel, after_s: float) -> None:
    try:
        await asyncio.sleep(after_s)
    finally:
        await channel.close()
