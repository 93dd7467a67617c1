"""Authorities and what they sign, made by openssl in a test's own folder: no key outlives its test."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CURVE = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


@dataclass(frozen=True)
class Authority:
    """Signs; made by `make_authority`."""

    folder: Path

    def signs(
        self,
        name: str,
        *,
        names: str = "IP:127.0.0.1,DNS:localhost",
        valid: str = "",
        usage: str = "serverAuth,clientAuth",
    ) -> Path:
        """A folder as `rose.certificates` reads it; `valid` are two times of openssl, for two days by default."""
        at = self.folder / name
        at.mkdir()
        _openssl(at, f"req -new {_CURVE} -subj /CN={name} -keyout tls.key -out request")
        (at / "extensions").write_text(f"subjectAltName={names}\nextendedKeyUsage={usage}\n")
        (at / "index").write_text("")
        (at / "ca.conf").write_text(
            f"[ca]\ndefault_ca=x\n[x]\ndatabase={at}/index\nnew_certs_dir={at}\ndefault_md=sha256\nrand_serial=yes\n"
            "policy=any\n[any]\ncommonName=supplied\n"
        )
        dates = "-days 2" if not valid else "-startdate {} -enddate {}".format(*valid.split())
        _openssl(
            at,
            f"ca -batch -notext -config ca.conf -cert ../ca.crt -keyfile ../ca.key -in request -out tls.crt {dates} "
            "-extfile extensions",
        )
        (at / "ca.crt").write_bytes((self.folder / "ca.crt").read_bytes())
        (at / "tls.key").chmod(0o600)
        return at


def renew(folder: Path, by: Path) -> None:
    """Put the files of another folder into this one, each at once."""
    for name in ("ca.crt", "tls.crt", "tls.key"):
        take_over(folder, by, name)


def take_over(folder: Path, by: Path, name: str) -> None:
    shutil.copy(by / name, folder / "draft")  # with its mode
    (folder / "draft").rename(folder / name)


def make_authority(folder: Path) -> Authority:
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(folder, f"req -x509 {_CURVE} -days 2 -subj /CN=authority -keyout ca.key -out ca.crt")
    return Authority(folder)


def _openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True, timeout=60)
