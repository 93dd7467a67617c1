"""What is wrong with one's own certificates is said before anybody is spoken to."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from certificate_tools import Authority, make_authority, renew, take_over

from rose import certificates
from rose.certificates import read_certificates
from rose.errors import ConfigError


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


def refused(folder: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_certificates(str(folder))
    return caught.value


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


def test_what_is_sound_is_read_and_its_key_is_not_shown(authority: Authority) -> None:
    found = read_certificates(str(authority.signs("sound")))
    assert found is not None
    assert "PRIVATE" not in repr(found)
    assert "PRIVATE" not in repr(found.identity)
    assert b"PRIVATE" in found.identity.key


def test_no_folder_is_no_certificates() -> None:
    assert read_certificates("") is None


@pytest.mark.parametrize(
    ("name", "valid", "usage", "said"),
    [
        ("old", "20200101000000Z 20200201000000Z", "serverAuth,clientAuth", "has expired"),
        ("early", "20990101000000Z 20990201000000Z", "serverAuth,clientAuth", "is not valid yet"),
        ("one-sided", "", "serverAuth", "is not made for both ends"),
        ("other-side", "", "clientAuth", "is not made for both ends"),
    ],
)
def test_a_certificate_that_no_peer_would_accept(
    authority: Authority, name: str, valid: str, usage: str, said: str
) -> None:
    error = refused(authority.signs(name, valid=valid, usage=usage))
    assert "tls.crt " + said in error.what
    assert "openssl x509" in error.to_do


def test_another_authority(authority: Authority, tmp_path: Path) -> None:
    folder = authority.signs("strange")
    (folder / "ca.crt").write_bytes((make_authority(tmp_path / "other").folder / "ca.crt").read_bytes())
    assert "is signed by another authority" in refused(folder).what


def test_a_key_that_others_may_read(authority: Authority) -> None:
    folder = authority.signs("open")
    (folder / "tls.key").chmod(0o640)
    error = refused(folder)
    assert "mode 0640" in error.what
    assert error.to_do.startswith("chmod 600 ")


def test_the_key_of_another_certificate(authority: Authority) -> None:
    folder = authority.signs("mixed")
    (folder / "tls.key").write_bytes((authority.signs("mixed-up") / "tls.key").read_bytes())
    assert "tls.key is the key of another certificate" in refused(folder).what


def test_the_key_of_another_kind(authority: Authority) -> None:
    folder = authority.signs("other-kind")
    openssl("genrsa", "-out", folder / "tls.key")
    assert "tls.key is the key of another certificate" in refused(folder).what


@pytest.mark.parametrize("way", ["pkcs8 -topk8", "ec -aes256"])
def test_a_key_with_a_passphrase_is_named_with_the_way_out(authority: Authority, way: str) -> None:
    folder = authority.signs(f"locked-by-{way[:2]}")
    key, new = folder / "tls.key", folder / "new"
    openssl(*way.split(), "-in", key, "-out", new, "-passout", "pass:hello")
    new.rename(key)
    key.chmod(0o600)
    error = refused(folder)
    assert error.what == f"{key} is locked with a passphrase"
    assert f"openssl pkey -in {key}" in error.to_do


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_what_is_written_around_the_pem_is_nobodys_business(authority: Authority, name: str) -> None:
    folder = authority.signs(f"remarked-{name}")
    file = folder / name
    file.write_bytes("# Z\u00fcrich\n".encode() + file.read_bytes() + b"\n# \xff\n")
    assert read_certificates(str(folder)) is not None


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00 no PEM"])
def test_files_that_are_missing_or_no_pem(
    authority: Authority, name: str, content: bytes | None, request: pytest.FixtureRequest
) -> None:
    folder = authority.signs(f"broken-{abs(hash(request.node.name))}")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    error = refused(folder)
    assert "a folder with ca.crt, tls.crt and tls.key" in error.expected
    assert f"{folder / name}" in error.what


def test_files_that_are_renewed_are_taken_at_the_next_look(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = authority.signs("short-lived"), make_authority(tmp_path / "other").signs("other")
    held = read_certificates(str(folder))
    assert held is not None
    before, context = held.identity, held.server_context()
    renew(folder, other)
    assert held.identity is before  # it was looked at just now
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    after = held.identity
    assert (after.authority, after.key) == ((other / "ca.crt").read_bytes(), (other / "tls.key").read_bytes())
    assert held.identity is after
    assert held.server_context() is held.server_context() is not context


def test_a_pair_that_is_half_written_changes_nothing_and_is_told_once(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    folder, new = authority.signs("half"), authority.signs("other-half")
    held = read_certificates(str(folder))
    assert held is not None
    before = held.identity
    take_over(folder, new, "tls.crt")
    assert held.identity is held.identity is before
    assert caplog.text.count("tls.key is the key of another certificate") == 1
    take_over(folder, new, "tls.key")
    assert held.identity.key == (new / "tls.key").read_bytes()


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
def test_renewed_files_that_no_peer_would_accept_keep_the_old_ones(
    authority: Authority, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    folder = authority.signs(f"to-be-spoilt-{name}")
    held = read_certificates(str(folder))
    assert held is not None
    before = held.identity
    (folder / name).unlink()
    assert held.identity is before
    (folder / name).write_bytes(b"no PEM")
    (folder / name).chmod(0o600)
    assert held.identity is before
    renew(folder, authority.signs(f"expired-{name}", valid="20200101000000Z 20200201000000Z"))
    assert held.identity is before
    assert "tls.crt has expired" in caplog.text


def test_what_was_refused_is_taken_once_it_may_be_though_it_was_not_written_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "LOOK_EVERY_S", 0.0)
    folder, new = authority.signs("at-first-open"), authority.signs("open-to-all")
    held = read_certificates(str(folder))
    assert held is not None
    before = held.identity
    (new / "tls.key").chmod(0o644)
    renew(folder, new)
    assert held.identity is before
    (folder / "tls.key").chmod(0o600)
    assert held.identity.key == (new / "tls.key").read_bytes()
