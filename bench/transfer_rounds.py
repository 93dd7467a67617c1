"""Side by side over the shaped link: from "new weights in the sender's memory" to "new bits in the receiver's".

All sides take turns in each round, in an order that is drawn for the round. After each, the receiver's buckets are read
anew and compared with the sender's, outside the time that counts.

Figures per density and side: `s_*` (seconds), `mb_*` (objects, without frames) and `vs_*` (their seconds by ours, in
this round). Ours also `publish_s_*` and `apply_s_*`: what the sender did before it announced, and the receiver's
work on deltas, part of which overlaps with receiving.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from bench.link import ShapedLink, shaped_link
from bench.registry import BenchFailed
from bench.transfer_methods import DENSE, GLOO, ONCE, OURS, PER_DENSITY
from bench.transfer_model import BUCKETS, MODEL_BYTES
from bench.transfer_process import EndProcess

LINK_BITS_PER_S = 1e9
GLOO_PORT = 29510
PERCENT_CHANGED = (0.3, 1.0, 3.0, 20.0, 60.0)
START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 300.0
"""Many times what a busy machine takes; the processes have shorter ones for what they wait for in between."""
MB = 1e6


class Ends:
    """The two processes of one round, with a model of so many `buckets`."""

    def __init__(self, link: ShapedLink, buckets: int) -> None:
        self.sender = EndProcess("sender", link.near, "bench.transfer_sender", (str(buckets),))
        self.receiver = EndProcess("receiver", link.far, "bench.transfer_receiver", (str(buckets),))
        self._sent = 0

    def start(self, address: str) -> None:
        token = secrets.token_hex(16)
        ports = self.sender.ask("open", address, token, timeout_s=START_TIMEOUT_S)
        self.receiver.ask("open", address, ports, token, timeout_s=START_TIMEOUT_S)

    def join(self, address: str) -> None:
        """For what goes through gloo; one pair at a time, for they meet at one port."""
        for end in (self.sender, self.receiver):
            end.tell("join", address, GLOO_PORT)
        for end in (self.sender, self.receiver):
            end.answer("join", START_TIMEOUT_S)

    def transfer(self, side: str, hashes: list[int]) -> dict[str, float]:
        """One transfer, and back. Raises BenchFailed if the receiver has not the bits of `hashes`."""
        self._sent += 1
        version = self.sender.ask("expect", side, self._sent, timeout_s=STEP_TIMEOUT_S)
        self.receiver.ask("receive", side, self._sent, version, timeout_s=STEP_TIMEOUT_S)
        sent = self.sender.ask("send", side, self._sent, timeout_s=STEP_TIMEOUT_S)
        received = self.receiver.ask("finish", timeout_s=STEP_TIMEOUT_S)
        if self.receiver.ask("hashes", timeout_s=STEP_TIMEOUT_S) != hashes:
            raise BenchFailed(f"{side} did not bring the new bits")
        for end in (self.sender, self.receiver):
            end.ask("back", timeout_s=STEP_TIMEOUT_S)
        return {
            "s": received["ended_s"] - sent["began_s"],
            "bytes": sent["sent_bytes"],
            "publish_s": sent["busy_s"],
            "apply_s": received["busy_s"],
        }

    def close(self) -> None:
        for end in (self.sender, self.receiver):
            end.ask("close", timeout_s=STEP_TIMEOUT_S)


@contextmanager
def ends_of(link: ShapedLink, buckets: int = BUCKETS) -> Iterator[Ends]:
    """Both are gone at the end of the `with`."""
    ends = Ends(link, buckets)
    try:
        ends.start(link.near.address)
        yield ends
        ends.close()
    finally:
        ends.sender.close()
        ends.receiver.close()


def one_round(index: int) -> dict[str, float | None]:
    """Raises BenchFailed if a side fails."""
    order = random.Random(index)
    with shaped_link(LINK_BITS_PER_S) as link, ends_of(link) as ends:
        ends.join(link.near.address)
        figures: dict[str, float | None] = {}
        once = _once(ends, index)
        figures |= {f"s_{side}": seconds for side, seconds in once.items()}
        for percent in order.sample(PERCENT_CHANGED, len(PERCENT_CHANGED)):
            figures |= _density(ends, percent, index, order, once)
    return figures


def _once(ends: Ends, index: int) -> dict[str, float]:
    """Seconds of those that send everything."""
    made = ends.sender.ask("change", 0.01, index, timeout_s=STEP_TIMEOUT_S)
    return {side: ends.transfer(side, made["hashes"])["s"] for side in ONCE}


def _density(
    ends: Ends, percent: float, index: int, order: random.Random, once: dict[str, float]
) -> dict[str, float | None]:
    name = f"{percent:g}pct"
    seed = 1000 * (index + 1) + round(10 * percent)
    made = ends.sender.ask("change", percent / 100, seed, timeout_s=STEP_TIMEOUT_S)
    found = {side: ends.transfer(side, made["hashes"]) for side in order.sample(PER_DENSITY, len(PER_DENSITY))}
    ours = found[OURS]
    figures: dict[str, float | None] = {
        f"changed_elements_{name}": made["changed"],
        f"publish_s_{name}": ours["publish_s"],
        f"apply_s_{name}": ours["apply_s"],
    }
    for side, values in found.items():
        figures[f"s_{side}_{name}"] = values["s"]
        figures[f"mb_{side}_{name}"] = values["bytes"] / MB
        figures[f"link_bytes_per_changed_{side}_{name}"] = values["bytes"] / made["changed"]
    figures |= {f"vs_{side}_{name}": found[side]["s"] / ours["s"] for side in PER_DENSITY if side != OURS}
    figures |= {f"vs_{side}_{name}": seconds / ours["s"] for side, seconds in once.items()}
    return figures


def link_bytes_per_s(figures: dict[str, float | None]) -> float:
    """What the link carried of the dense model."""
    seconds = figures[f"s_{DENSE}"]
    assert seconds is not None, GLOO
    return MODEL_BYTES / seconds
