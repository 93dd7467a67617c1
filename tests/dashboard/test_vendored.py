"""Third-party files of the page are those that were reviewed, and their licences lie beside them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

ROSE = Path(__file__).parents[2] / "rose"
VENDOR = ROSE / "dashboard" / "assets" / "vendor"
UPLOT = ROSE / "report" / "assets" / "uplot"
HASHES = {
    VENDOR / "htm-preact.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    VENDOR / "LICENSE.htm": "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    UPLOT / "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    UPLOT / "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


@pytest.mark.parametrize(("file", "expected"), HASHES.items(), ids=lambda one: getattr(one, "name", ""))
def test_a_vendored_file_is_unchanged(file: Path, expected: str) -> None:
    assert hashlib.sha256(file.read_bytes()).hexdigest() == expected


def test_every_vendored_file_is_known() -> None:
    known = {file.name for file in HASHES} | {"LICENSE.preact", "README.md"}
    assert {file.name for file in VENDOR.iterdir()} <= known


def test_versions_are_exact_and_documented() -> None:
    front = ROSE / "dashboard" / "front"
    wanted = json.loads((front / "package.json").read_text())["dependencies"]
    locked = json.loads((front / "package-lock.json").read_text())["packages"]
    for name, version in wanted.items():
        assert locked[f"node_modules/{name}"]["version"] == version
        assert locked[f"node_modules/{name}"]["integrity"].startswith("sha512-")
    assert wanted["uplot"] in (UPLOT / "README.md").read_text()
    assert wanted["htm"] in (VENDOR / "README.md").read_text()


def test_there_is_one_copy_of_uplot() -> None:
    assert [file.parent for file in ROSE.rglob("uPlot*.js")] == [UPLOT]


@pytest.mark.parametrize("file", sorted((ROSE / "dashboard" / "assets").glob("*.*")), ids=lambda one: one.name)
def test_our_own_files_name_no_other_host(file: Path) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert "://" not in text
    assert "innerHTML" not in text
