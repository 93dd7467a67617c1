"""`teller_main OUT`: a service that tells its process's id as a fact, and waits to be ended."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rose.runs import open_service
from rose.status import StatusBoard
from rose.waits import WaitBoard

if __name__ == "__main__":
    waits = WaitBoard()
    with open_service("teller", Path(sys.argv[1]), waits, {}) as service, StatusBoard(service, waits) as board:
        board.fact("address", f"process {os.getpid()}")
        time.sleep(600)
