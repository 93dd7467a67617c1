"""Every figure that the docs quote stands in a committed bench file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.claims import Claim, read_claims, wrong_claims
from bench.result import ROOT

FIGURES = {"gain": 0.4043, "wall_s": 151.25, "parity": 1.23e-5, "none": None, "deep": {"max": 12_345}, "yes": True}


def claim(figure: str, shown: str, file: str = "demo.json") -> str:
    return f"<!-- claim: {file} {figure} -->{shown}<!-- /claim -->"


def problems(folder: Path, text: str) -> list[str]:
    (folder / "demo.json").write_text(json.dumps(FIGURES))
    (folder / "page.md").write_text(text)
    return wrong_claims(folder, [folder / "page.md"])


def test_the_docs_of_this_project() -> None:
    rooms = [ROOT / room / "README.md" for room in ("transfer", "executor", "rose/demo")]
    documents = [ROOT / "README.md", *rooms, *sorted((ROOT / "docs").rglob("*.md"))]
    assert wrong_claims(ROOT, documents) == []


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        ("gain", "0.40"),
        ("gain", "0.4043"),
        ("gain", "40 %"),
        ("gain", "+40.4 %"),
        ("wall_s", "151 s"),
        ("wall_s", "151.3"),
        ("wall_s", "151.2"),
        ("parity", "1.2e-5"),
        ("deep.max", "12,345 tokens"),
        ("deep.max", "1.2e4"),
    ],
)
def test_claims_that_hold(tmp_path: Path, figure: str, shown: str) -> None:
    assert problems(tmp_path, f"It gained {claim(figure, shown)} there.") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (claim("gain", "0.41"), "the text says 0.41, the file 0.4043"),
        (claim("gain", "0.4044"), "the text says"),
        (claim("gain", "0.40 %"), "the text says"),
        (claim("wall_s", "-151"), "the text says"),
        (claim("parity", "1.3e-5"), "the text says"),
        (claim("other", "1"), "no such figure"),
        (claim("deep.min", "1"), "no such figure"),
        (claim("gain.max", "1"), "no such figure"),
        (claim("gain", "1", file="gone.json"), "no such file"),
        (claim("none", "0"), "None is not a number"),
        (claim("yes", "1"), "True is not a number"),
        (claim("gain", "much"), "does not begin with a number"),
        ("<!-- claim: demo.json gain -->0.40", "1 claims are opened and 0 closed"),
        ("<!-- claim: demo.json -->0.40<!-- /claim -->", "but 0 can be read"),
    ],
)
def test_claims_that_do_not(tmp_path: Path, text: str, why: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert why in problem
    assert problem.startswith("page.md: ")


def test_several_claims_in_one_text() -> None:
    text = claim("a", "1") + " and\n" + claim("b.c", "2\n%", file="x/y.json")
    assert read_claims(text) == [Claim("demo.json", "a", "1"), Claim("x/y.json", "b.c", "2\n%")]
