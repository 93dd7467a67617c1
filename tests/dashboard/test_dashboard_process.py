from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from dashboard_process import DashboardProcess

from rose.dashboard.program import run_dashboard
from rose.errors import ClusterError
from rose.runs import list_runs, runtime_root
from rose.status import Page, read_status

pytestmark = pytest.mark.usefixtures("runtime_dir")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read(), "utf-8")


def written_page() -> Page:
    """The status page, as soon as it says that the dashboard serves."""
    (found,), deadline = list_runs(runtime_root()), time.monotonic() + 30
    while (page := read_status(found, time.time()).page) is None or not page.parts:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return page


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_serves_until_a_signal_though_a_page_is_open(tmp_path: Path, signum: signal.Signals, status: int) -> None:
    with contextlib.closing(DashboardProcess(tmp_path)) as dashboard:
        stream = urllib.request.urlopen(f"{dashboard.url}api/events", timeout=30)
        assert stream.readline() == b"event: whole\n"
        assert get(f"{dashboard.url}healthz") == "ok\n"
        page = written_page()
        assert page.facts["address"] == dashboard.url
        assert "rose_dashboard_viewers 1.0" in get(str(page.facts["metrics"]))
        viewers_become_one_again(dashboard)
        assert list(json.loads(get(f"{dashboard.url}api/state"))["state"]["services"]) == [page.run_id]
        only_loopback_is_answered(dashboard)
        assert dashboard.end(signum) == status
        stream.close()
    assert list_runs(runtime_root()) == []
    (log,) = tmp_path.glob("dashboard-*/log.jsonl")
    assert [json.loads(line)["event"] for line in log.read_text().splitlines()] == ["serving", "ended"]


def viewers_become_one_again(dashboard: DashboardProcess) -> None:
    """After a page that goes in the middle of its stream."""
    with urllib.request.urlopen(f"{dashboard.url}api/events", timeout=30) as stream:
        stream.readline()
        assert "rose_dashboard_viewers 2.0" in get(f"{dashboard.url}metrics")
    deadline = time.monotonic() + 30
    while "rose_dashboard_viewers 1.0" not in get(f"{dashboard.url}metrics"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def only_loopback_is_answered(dashboard: DashboardProcess) -> None:
    sockets = psutil.Process(dashboard.process.pid).net_connections("tcp")
    assert {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    request = urllib.request.Request(dashboard.url, headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(request, timeout=30)


def test_a_taken_port_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=f"port {port} for the dashboard: taken"):
            run_dashboard(port, tmp_path / "runs", lambda page: None)
    assert not (tmp_path / "runs").exists()
    assert list_runs(runtime_root()) == []
