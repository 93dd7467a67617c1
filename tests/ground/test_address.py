"""What can be dialed passes, and nothing else."""

from __future__ import annotations

import pytest

from rose.address import checked_url, host_and_port
from rose.errors import ConfigError

NO_HOSTS = ("a..b", "a" * 64, "a b", "a\x07", "\udcff", "")
NO_PORTS = ("", "0", "-1", "65536", "9" * 5000, "٧")


@pytest.mark.parametrize(
    ("address", "means"),
    [
        ("trainer:7070", ("trainer", 7070)),
        ("[fd00::7]:1", ("fd00::7", 1)),
        ("[fe80::1%eth0]:7070", ("fe80::1%eth0", 7070)),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, means: tuple[str, int]) -> None:
    assert host_and_port(address) == means


@pytest.mark.parametrize(
    "wrong",
    ["", "7070", "fd00::7:1", "[]:1", *(f"{host}:1" for host in NO_HOSTS), *(f"host:{port}" for port in NO_PORTS)],
)
def test_what_is_no_address_is_refused_in_few_words(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is no address; expected HOST:PORT") as refused:
        host_and_port(wrong)
    assert len(refused.value.what) < 120


@pytest.mark.parametrize(
    "url", ["http://there", "http://127.0.0.1:8000", "http://[::1]:8000/metrics", "https://node-7.example:443"]
)
def test_a_url_is_handed_through(url: str) -> None:
    assert checked_url(url) == url


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "there", "there:8000", "ftp://there", "http://", "http://:80", "http://[::1", "http://a/b\nc"),
        *(f"http://{host}:1" for host in NO_HOSTS),
        *(f"http://host:{port}" for port in NO_PORTS if port),
    ],
)
def test_what_is_no_url_is_refused_in_few_words(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a service; expected http://HOST:PORT") as refused:
        checked_url(wrong)
    assert len(refused.value.what) < 500
