"""Rebuild the generated modules: `python -m rose.proto.generate [FOLDER]`.

Needs the compiler of the `dev` extra (grpcio-tools); using the generated modules does not.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from rose.errors import ContractError

PROTO_DIR = Path(__file__).parent / "v1"


def generate(out_dir: Path) -> None:
    """Compile every `.proto` of the project into `out_dir`, which stands for the checkout's root.

    Raises ContractError if the compiler refuses.
    """
    root = PROTO_DIR.parents[2]
    protos = sorted(PROTO_DIR.glob("*.proto"))
    services = [path for path in protos if "\nservice " in path.read_text()]
    include = [f"-I{root}", f"-I{files('grpc_tools') / '_proto'}"]
    _compile([*include, f"--python_out={out_dir}", f"--pyi_out={out_dir}"], protos)
    _compile([*include, f"--grpc_python_out={out_dir}"], services)
    for stub in out_dir.rglob("*_pb2.pyi"):
        # The compiler writes bare `Mapping`s, which a strict type checker refuses.
        stub.write_text(f"# mypy: ignore-errors\n{stub.read_text()}")


def _compile(options: list[str], protos: list[Path]) -> None:
    """Run the compiler in a process of its own: beside the libraries that NIXL brings both would crash."""
    names = [str(path.relative_to(PROTO_DIR.parents[2])) for path in protos]
    done = subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *names], check=False)
    if done.returncode != 0:
        raise ContractError(f"protoc refused {', '.join(names)}", to_do="read its message above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO_DIR.parents[2])
