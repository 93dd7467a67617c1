"""What the trainer's tests share: the shipped model, its renderer, empty books."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_site import RaySite
from stand_ins import Logged

import rose.demo.warmstart
from rose.env.chat import ChatRenderer
from rose.logs import open_log
from rose.trainer.books import Books
from rose.waits import WaitBoard


@pytest.fixture(scope="session")
def shipped_model() -> Path:
    """The warm start's model folder; tests must not write into it."""
    return Path(rose.demo.warmstart.__file__).parent / "model"


@pytest.fixture(scope="session")
def babbling_model(shipped_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with weights that know nothing: hundreds of tokens a turn, so that something is on its way."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("babbling") / "model"
    shutil.copytree(shipped_model, folder)
    torch.manual_seed(0)
    weights = {
        name: torch.randn_like(tensor) * 0.02 if tensor.dim() > 1 else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def renderer(shipped_model: Path) -> ChatRenderer:
    from rose.trainer.policy import load_tokenizer

    return ChatRenderer(load_tokenizer(shipped_model))


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    """The log of this process, as a run's."""
    output = tmp_path / "runs" / "run"
    output.mkdir(parents=True)
    with open_log(output / "log.jsonl"):
        yield Logged(output)


@pytest.fixture
def waits() -> WaitBoard:
    return WaitBoard()


@pytest.fixture(scope="session")
def ray_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RaySite]:
    """The Ray that tests share; files that name this fixture share one worker of pytest's too."""
    with asyncio.Runner() as runner:
        made = RaySite(runner, tmp_path_factory.mktemp("ray"))
        yield made
        made.close()
        assert made.waits.snapshot() == ()
