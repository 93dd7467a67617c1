"""What crosses the slow link: publisher here, a relay and all engines behind it there; one replica, then eight.

Each replica is four ranks wide and fetches from the relay. Counted are the bytes that leave the publisher's side of the
link, headers and all, while three versions with 1 % changed are published and every rank gets them; and the bytes
that a rank receives of each version, against a fourth of its delta.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import fmean

from bench.link import ShapedLink, shaped_link
from bench.transfer_process import EndProcess
from bench.transfer_replicas import TP
from bench.transfer_rounds import LINK_BITS_PER_S

REPLICAS = (1, 8)
VERSIONS = (2, 3, 4)
STEP_TIMEOUT_S = 300.0
MODULE = "bench.transfer_wan_ends"


def wan_figures() -> dict[str, float]:
    """Raises BenchFailed if an end fails."""
    figures: dict[str, float] = {}
    for replicas in REPLICAS:
        with shaped_link(LINK_BITS_PER_S) as link, _ends(link, replicas) as ends:
            figures |= _measured(link, ends, replicas)
    few, many = (figures[f"wan_bytes_{_named(replicas)}"] for replicas in REPLICAS)
    return figures | {"wan_bytes_ratio": many / few}


def _measured(link: ShapedLink, ends: dict[str, EndProcess], replicas: int) -> dict[str, float]:
    publisher, receivers = ends["publisher"], ends["receivers"]
    receivers.ask("fetch", 1, timeout_s=STEP_TIMEOUT_S)
    joined_bytes = link.near.sent_bytes()
    delta_bytes = 0
    received: list[int] = []
    for version in VERSIONS:
        delta_bytes += publisher.ask("publish", version, timeout_s=STEP_TIMEOUT_S)
        received += receivers.ask("fetch", version, timeout_s=STEP_TIMEOUT_S)
    name = _named(replicas)
    return {
        f"wan_join_bytes_{name}": joined_bytes,
        f"wan_bytes_{name}": link.near.sent_bytes() - joined_bytes,
        f"wan_delta_bytes_{name}": delta_bytes,
        "bytes_per_receiver": fmean(received),
        "bytes_per_receiver_ratio": fmean(received) / (delta_bytes / len(VERSIONS) / TP),
    }


def _named(replicas: int) -> str:
    return "1_replica" if replicas == 1 else f"{replicas}_replicas"


@contextmanager
def _ends(link: ShapedLink, replicas: int) -> Iterator[dict[str, EndProcess]]:
    """Started, and gone at the end of the `with`."""
    places = {"publisher": link.near, "relay": link.far, "receivers": link.far}
    token = secrets.token_hex(16)
    with ExitStack() as started:
        ends = {}
        for role, end in places.items():
            ends[role] = EndProcess(role, end, MODULE, [role])
            started.callback(ends[role].close)
        port = ends["publisher"].ask("open", link.near.address, token, replicas, timeout_s=STEP_TIMEOUT_S)
        port = ends["relay"].ask("open", link.near.address, port, token, timeout_s=STEP_TIMEOUT_S)
        ends["receivers"].ask("open", port, token, replicas, timeout_s=STEP_TIMEOUT_S)
        yield ends
        for role in reversed(places):
            ends[role].ask("close", timeout_s=STEP_TIMEOUT_S)
