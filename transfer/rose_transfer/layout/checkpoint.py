"""The parameters of a model as its folder stores them: the coordinates that all layouts share."""

from __future__ import annotations

from pathlib import Path

from rose.errors import TransferError
from rose_transfer.layout.dtypes import dtype_name
from rose_transfer.layout.layout import Parameter
from rose_transfer.tensor_file import read_entries


def checkpoint_parameters(model_dir: Path) -> dict[str, Parameter]:
    """Name, shape and dtype of every tensor in the safetensors files of a model folder.

    Raises TransferError if there is none, one cannot be read, or two files hold one name.
    """
    parameters: dict[str, Parameter] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        for entry in read_entries(file):
            if entry.name in parameters:
                raise TransferError(f"{model_dir} holds {entry.name} twice", expected="each tensor in one file")
            parameters[entry.name] = Parameter(entry.shape, dtype_name(entry.torch_dtype))
    if not parameters:
        raise TransferError(f"{model_dir} has no safetensors file", expected="weights as *.safetensors")
    return parameters
