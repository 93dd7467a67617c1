"""The shaped link comes and goes whole, and the processes at its ends answer or are found out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench import link, transfer_process
from bench.link import PREFIX, End, link_missing, shaped_link
from bench.registry import BenchFailed
from bench.transfer_process import EndProcess

MODULE = "tests.bench.bench_end_main"
ANSWER_S = 60.0


@pytest.fixture(scope="module")
def _can_link() -> None:
    if why := link_missing():
        pytest.skip(why)


class Here(End):
    """Where the tests are: no namespace."""

    def command(self, *words: str) -> list[str]:
        return list(words)


HERE = Here("", "lo", "127.0.0.1")


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=20, check=True).stdout
    return {line.split(" ")[0] for line in listed.splitlines()}


@pytest.mark.usefixtures("_can_link")
def test_a_link_carries_bytes_counts_them_and_is_gone_afterwards() -> None:
    outside = os.listdir("/sys/class/net")
    with shaped_link(1e9) as made:
        assert {made.near.namespace, made.far.namespace} <= namespaces()
        before = made.near.sent_bytes()
        sent = "import socket, sys; socket.socket(type=socket.SOCK_DGRAM).sendto(bytes(1000), (sys.argv[1], 9))"
        subprocess.run(made.near.command(sys.executable, "-c", sent, made.far.address), check=True, timeout=ANSWER_S)
        assert made.near.sent_bytes() - before >= 1000
        shape = subprocess.run(
            ["tc", "-n", made.far.namespace, "qdisc", "show"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
        assert "tbf" in shape
        assert "rate 1Gbit" in shape
        assert os.listdir("/sys/class/net") == outside
    assert not {made.near.namespace, made.far.namespace} & namespaces()


@pytest.mark.usefixtures("_can_link")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_the_link_down(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), shaped_link(1e9):
        os.kill(os.getpid(), number)
    assert not any(name.startswith(f"{PREFIX}{os.getpid()}-") for name in namespaces())


@pytest.mark.usefixtures("_can_link")
def test_what_a_killed_bench_left_behind_is_removed_and_nothing_else() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(ANSWER_S)
    assert not psutil.pid_exists(ended.pid)
    left, alive = f"{PREFIX}{ended.pid}-near", f"{PREFIX}{os.getppid()}-other"
    for name in (left, alive):
        subprocess.run(["ip", "netns", "add", name], check=True, timeout=20)
    try:
        with shaped_link(1e9):
            assert left not in namespaces()
            assert alive in namespaces()
    finally:
        subprocess.run(["ip", "netns", "delete", alive], check=True, timeout=20)


def test_without_root_or_tools_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert link_missing.__wrapped__() == "needs root, for network namespaces"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "iproute2" in link_missing.__wrapped__()


def test_a_command_that_fails_is_named() -> None:
    with pytest.raises(BenchFailed, match="no-such-command"):
        link._run("no-such-command")
    with pytest.raises(BenchFailed, match="false: status 1"):
        link._run("false")


def test_a_process_answers_and_tells_what_went_wrong() -> None:
    end = EndProcess("end", HERE, MODULE)
    try:
        assert end.ask("twice", 21, timeout_s=ANSWER_S) == 42
        with pytest.raises(BenchFailed, match=r"the end could not fail: transfer: no room; free some; odd"):
            end.ask("fail", timeout_s=ANSWER_S)
        assert end.ask("twice", 1, timeout_s=ANSWER_S) == 2
        with pytest.raises(BenchFailed, match="could not die: it has ended"):
            end.ask("die", timeout_s=ANSWER_S)
        with pytest.raises(BenchFailed, match="it has ended"):
            end.ask("twice", 1, timeout_s=ANSWER_S)
    finally:
        end.close()


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    end = EndProcess("end", HERE, MODULE)
    assert end.ask("twice", 1, timeout_s=ANSWER_S) == 2
    with pytest.raises(BenchFailed, match="no answer after"):
        end.ask("hang", timeout_s=0.05)
    monkeypatch.setattr(transfer_process, "END_TIMEOUT_S", 0.05)
    end.close()
    assert not psutil.pid_exists(end._process.pid)


def test_a_process_ends_when_its_bench_is_gone() -> None:
    end = EndProcess("end", HERE, MODULE)
    assert end.ask("twice", 1, timeout_s=ANSWER_S) == 2
    end._connection.close()
    assert end._process.wait(ANSWER_S) == 0
    end.close()


def test_what_a_process_left_in_temporary_folders_is_removed() -> None:
    end = EndProcess("end", HERE, MODULE)
    left = Path(end.ask("leave", timeout_s=ANSWER_S))
    assert left.is_file()
    with pytest.raises(BenchFailed):
        end.ask("die", timeout_s=ANSWER_S)
    end.close()
    assert not left.exists()
