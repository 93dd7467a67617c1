"""Figures in the docs are quotations of committed bench files, and this checks them.

A claim is written `<!-- claim: bench/results/transfer.json s_dense -->4.48<!-- /claim -->`: a file, a dotted path
into it, and the number shown. The number must be what the file holds, rounded to the digits shown; with a `%` the
file holds a fraction. Anything after the number (a unit) is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

CLAIM = re.compile(r"<!-- claim: (\S+) (\S+) -->(.*?)<!-- /claim -->", re.DOTALL)
NUMBER = re.compile(r"\s*([+-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(%?)")


@dataclass(frozen=True, slots=True)
class Claim:
    """`shown` stands in the text for the figure at `figure` of `file`."""

    file: str
    figure: str
    shown: str


def read_claims(text: str) -> list[Claim]:
    """Raises ValueError if a marker is not closed or not readable: it would silently claim nothing."""
    found = [Claim(*match) for match in CLAIM.findall(text)]
    marked = text.count("<!-- claim"), text.count("<!-- /claim")
    if marked != (len(found), len(found)):
        raise ValueError(f"{marked[0]} claims are opened and {marked[1]} closed, but {len(found)} can be read")
    return found


def wrong_claims(root: Path, documents: Iterable[Path]) -> list[str]:
    """One line per claim that does not hold; file names in claims are relative to `root`."""
    wrong = []
    for document in documents:
        try:
            for claim in read_claims(document.read_text(encoding="utf-8")):
                if problem := _problem(root, claim):
                    wrong.append(f"{document.relative_to(root)}: {claim.file} {claim.figure}: {problem}")
        except ValueError as error:
            wrong.append(f"{document.relative_to(root)}: {error}")
    return wrong


def _problem(root: Path, claim: Claim) -> str:
    path = root / claim.file
    if not path.is_file():
        return "no such file"
    held: Any = json.loads(path.read_text(encoding="utf-8"))
    for key in claim.figure.split("."):
        if not isinstance(held, dict) or key not in held:
            return "no such figure"
        held = held[key]
    if isinstance(held, bool) or not isinstance(held, (int, float)):
        return f"{held!r} is not a number"
    match = NUMBER.match(claim.shown)
    if match is None:
        return f"{claim.shown!r} does not begin with a number"
    shown = Decimal(match[1].replace(",", ""))
    exact = Decimal(str(held)) * (100 if match[2] else 1)
    return "" if _rounds_to(exact, shown) else f"the text says {claim.shown.strip()}, the file {held}"


def _rounds_to(exact: Decimal, shown: Decimal) -> bool:
    """Within half a unit of the last digit shown."""
    exponent = shown.as_tuple().exponent
    assert isinstance(exponent, int), "NUMBER matches finite numbers only"
    return abs(exact - shown) <= Decimal(5).scaleb(exponent - 1)
