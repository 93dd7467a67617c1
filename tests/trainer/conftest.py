"""What the trainer's tests share: the shipped model, its renderer, empty books."""

from __future__ import annotations

from pathlib import Path

import pytest

import rose.demo.warmstart
from rose.env.chat import ChatRenderer
from rose.trainer.books import Books
from rose.waits import WaitBoard


@pytest.fixture(scope="session")
def shipped_model() -> Path:
    """The warm start's model folder; tests must not write into it."""
    return Path(rose.demo.warmstart.__file__).parent / "model"


@pytest.fixture(scope="session")
def renderer(shipped_model: Path) -> ChatRenderer:
    from rose.trainer.policy import load_tokenizer

    return ChatRenderer(load_tokenizer(shipped_model))


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def waits() -> WaitBoard:
    return WaitBoard()
