"""A slow link between two places on one machine: two network namespaces, a veth pair, a token bucket at each end.

Invariants
- Nothing outside the two namespaces is touched: both ends of the pair are made inside them.
- Whatever ends the `with`, Ctrl-C and SIGTERM included, both namespaces are removed, and the link with them. What a
  killed process left behind is removed by the next one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import FrameType

import psutil

from bench.registry import BenchFailed

PREFIX = "rose-bench-"
COMMAND_TIMEOUT_S = 20.0
BURST_BYTES = 2**20
QUEUE_MS = 50
"""As much waits at the sender as the link carries in this time; the rest is dropped, as a router does."""


@dataclass(frozen=True, slots=True)
class End:
    """One side of the link: `address` belongs to `interface` in `namespace`, which also has a loopback of its own."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """`words` as a command that runs on this side."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def sent_bytes(self) -> int:
        """Bytes that this side has put on the link so far, headers included."""
        return int(_run(*self.command("cat", f"/sys/class/net/{self.interface}/statistics/tx_bytes")))


@dataclass(frozen=True, slots=True)
class ShapedLink:
    near: End
    far: End
    bits_per_s: float


@cache
def link_missing() -> str:
    """Why no link can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs ip and tc (Debian: apt install iproute2)"
    try:
        with shaped_link(1e9):
            return ""
    except BenchFailed as error:
        return f"no network namespaces with a shaped link here: {error.what}"


@contextmanager
def shaped_link(bits_per_s: float) -> Iterator[ShapedLink]:
    """A link of `bits_per_s` each way, until the end of the `with`. Raises BenchFailed if it cannot be made."""
    _remove_left_behind()
    near, far = (
        End(f"{PREFIX}{os.getpid()}-{side}", side, f"10.213.7.{number}") for side, number in (("near", 1), ("far", 2))
    )
    with _terminated_as_by_ctrl_c():
        try:
            for end in (near, far):
                _run("ip", "netns", "add", end.namespace)
                _run("ip", "-n", end.namespace, "link", "set", "lo", "up")
            pair = ("type", "veth", "peer", "name", far.interface, "netns", far.namespace)
            _run("ip", "link", "add", near.interface, "netns", near.namespace, *pair)
            for end in (near, far):
                _run("ip", "-n", end.namespace, "address", "add", f"{end.address}/30", "dev", end.interface)
                _run("ip", "-n", end.namespace, "link", "set", end.interface, "up")
                shape = f"tbf rate {bits_per_s:.0f}bit burst {BURST_BYTES} latency {QUEUE_MS}ms"
                _run("tc", "-n", end.namespace, "qdisc", "add", "dev", end.interface, "root", *shape.split())
            yield ShapedLink(near, far, bits_per_s)
        finally:
            for end in (near, far):
                _remove(end.namespace)


@contextmanager
def _terminated_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM would end the process without a `finally`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remove_left_behind() -> None:
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split(" ")[0]
        owner = name.removeprefix(PREFIX).split("-")[0]
        if name.startswith(PREFIX) and owner.isdecimal() and not psutil.pid_exists(int(owner)):
            _remove(name)


def _remove(namespace: str) -> None:
    # It may not have come to be; and an error here would hide the one that ended the `with`.
    with suppress(BenchFailed):
        _run("ip", "netns", "delete", namespace)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchFailed(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise BenchFailed(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
