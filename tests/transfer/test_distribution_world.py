"""The simulator's world of distribution over real connections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from distribution_tools import CLIENT, free_port
from transport_tools import QUICK_SERVER, TOKEN

from rose.simulator.distribution_world import DistributionWorld
from rose.waits import WaitBoard
from rose_transfer.transport.interface import ObjectClient, ObjectServer, ObjectSource
from rose_transfer.transport.tcp import TcpClient, TcpServer


class Connections:
    """One port, and whoever serves there."""

    def __init__(self) -> None:
        self.waits = WaitBoard()
        self._port = free_port()

    @property
    def serve(self) -> Callable[[ObjectSource], ObjectServer]:
        return partial(TcpServer, token=TOKEN, waits=self.waits, port=self._port, limits=QUICK_SERVER)

    def client(self) -> ObjectClient:
        return TcpClient("127.0.0.1", self._port, token=TOKEN, waits=self.waits, limits=CLIENT)


@pytest.mark.parametrize("seed", range(8))
def test_an_engine_is_where_it_says_whatever_happens(seed: int) -> None:
    connections = Connections()
    world = DistributionWorld(seed, connections)
    world.run()
    assert connections.waits.snapshot() == ()
    assert world.jumps > world.refused, "most of what was asked for could be had"
