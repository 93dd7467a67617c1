"""A version as a model folder: whole or absent, and readable by anybody."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rose.errors import ConfigError, TransferError
from rose_transfer import snapshot as module
from rose_transfer.layout.checkpoint import model_shapes
from rose_transfer.snapshot import WEIGHTS, Snapshot, remove, write

Weights = dict[str, torch.Tensor]


def test_a_version_is_a_whole_model_folder_of_rounded_weights(tmp_path: Path, base: Path, masters: Weights) -> None:
    published = write(tmp_path / "versions", 7, masters, base)
    assert published.path == tmp_path / "versions" / "v000007"
    files = {file.name: file.stat().st_size for file in published.path.iterdir()}
    assert files.keys() == {"config.json", "tokenizer.json", WEIGHTS}
    assert published.bytes == sum(files.values())
    check(published, masters)


def check(written: Snapshot, masters: Weights) -> None:
    found = load_file(written.path / WEIGHTS)
    assert found.keys() == masters.keys() - {"lm_head.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, masters[name].to(torch.bfloat16))


def test_the_original_is_not_touched_by_what_happens_to_the_base(tmp_path: Path, base: Path, masters: Weights) -> None:
    published = write(tmp_path / "versions", 1, masters, base)
    (base / "config.json").write_text("broken")
    assert json.loads((published.path / "config.json").read_text())["model_type"] == "qwen3"


def test_a_folder_is_written_once(tmp_path: Path, base: Path, masters: Weights) -> None:
    published = write(tmp_path, 1, masters, base)
    with pytest.raises(TransferError, match="there already"):
        write(tmp_path, 1, masters, base)
    check(published, masters)


def test_remove_takes_the_name_first_and_may_be_repeated(tmp_path: Path, base: Path, masters: Weights) -> None:
    published = write(tmp_path / "versions", 1, masters, base)
    remove(published.path)
    remove(published.path)
    assert list((tmp_path / "versions").iterdir()) == []


def _without(masters: Weights) -> Weights:
    return {name: tensor for name, tensor in masters.items() if name != "model.norm.weight"}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_without, "have no model.norm.weight"),
        (lambda m: {**m, "model.norm.weight": torch.ones(9)}, r"model.norm.weight has shape \(9,\)"),
        (lambda m: {**m, "model.norm.weight": torch.full((8,), torch.nan)}, "not finite"),
        (lambda m: {**m, "model.extra": torch.ones(8)}, "no tensor model.extra"),
        (lambda m: {**m, "lm_head.weight": m["lm_head.weight"].clone()}, "no tensor lm_head.weight"),
    ],
)
def test_wrong_weights_are_refused_and_leave_nothing(
    tmp_path: Path, base: Path, masters: Weights, spoil: Callable[[Weights], Weights], why: str
) -> None:
    with pytest.raises(TransferError, match=why):
        write(tmp_path / "versions", 1, spoil(masters), base)
    assert not (tmp_path / "versions").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"may not mount: {done.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def _grown(base: Path, masters: Weights) -> Weights:
    """Weights of about 40 KiB, and a base folder of that shape."""
    from safetensors.torch import save_file

    grown = {name: tensor for name, tensor in masters.items() if name != "lm_head.weight"}
    grown["model.embed_tokens.weight"] = torch.randn(2560, 8)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in grown.items()}, base / WEIGHTS)
    return grown


def test_a_full_disk_is_seen_before_writing(small_disk: Path, base: Path, masters: Weights) -> None:
    grown = _grown(base, masters)
    old = write(small_disk, 1, grown, base)
    with pytest.raises(TransferError, match=r"no room for version 2 .*: \d+ bytes needed, \d+ free"):
        write(small_disk, 2, grown, base)
    assert [file.name for file in small_disk.iterdir()] == ["v000001"]
    check(old, grown)


def test_a_disk_that_fills_up_while_writing_leaves_nothing_half_written(
    small_disk: Path, base: Path, masters: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = _grown(base, masters)
    old = write(small_disk, 1, grown, base)
    usage = shutil.disk_usage(small_disk)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    with pytest.raises(TransferError, match="no room for version 2"):
        write(small_disk, 2, grown, base)
    assert [file.name for file in small_disk.iterdir()] == ["v000001"]
    check(old, grown)


@pytest.mark.parametrize("failing", ["fsync", "rename"])
@pytest.mark.parametrize(("number", "why"), [(errno.ENOSPC, "no room"), (errno.EIO, "cannot write version 2")])
def test_any_failed_write_leaves_the_old_version_and_nothing_else(
    tmp_path: Path, base: Path, masters: Weights, monkeypatch: pytest.MonkeyPatch, failing: str, number: int, why: str
) -> None:
    root = tmp_path / "versions"
    old = write(root, 1, masters, base)

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    if failing == "fsync":
        monkeypatch.setattr(module.os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(TransferError, match=why):
        write(root, 2, masters, base)
    monkeypatch.undo()
    assert [file.name for file in root.iterdir()] == ["v000001"]
    check(old, masters)


def test_a_publisher_that_was_killed_is_no_obstacle(tmp_path: Path, base: Path, masters: Weights) -> None:
    (tmp_path / ".v000001.draft").mkdir()
    (tmp_path / ".v000001.draft" / WEIGHTS).write_bytes(b"half")
    check(write(tmp_path, 1, masters, base), masters)
    assert not (tmp_path / ".v000001.draft").exists()


def test_what_is_not_a_model_folder_says_so(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model folder"):
        model_shapes(tmp_path)
    (base / WEIGHTS).write_bytes(b"no")
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        model_shapes(base)
    (base / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="no safetensors file"):
        model_shapes(base)
