from __future__ import annotations

import pytest

from rose.waits import WaitBoard


@pytest.fixture
def board() -> WaitBoard:
    return WaitBoard()
