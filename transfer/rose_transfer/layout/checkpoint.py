"""The parameters of a model as its folder stores them: the coordinates that all layouts share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rose.errors import ConfigError, TransferError
from rose_transfer.layout.layout import Parameter

_DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def checkpoint_parameters(model_dir: Path) -> dict[str, Parameter]:
    """Name, shape and dtype of every tensor in the safetensors files of a model folder.

    Raises TransferError if there is none, one cannot be read, two files hold one name, or a dtype is not a float's
    of 16 or 32 bits.
    """
    parameters: dict[str, Parameter] = {}
    for file in sorted(model_dir.glob("*.safetensors")):
        for name, parameter in _file_parameters(file).items():
            if name in parameters:
                raise TransferError(f"{model_dir} holds {name} twice", expected="each tensor in one file")
            parameters[name] = parameter
    if not parameters:
        raise TransferError(f"{model_dir} has no safetensors file", expected="weights as *.safetensors")
    return parameters


def model_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a model folder.

    Raises ConfigError if the folder has no `config.json` or no readable safetensors file.
    """
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"{model_dir} is not a model folder",
            expected="a Hugging Face folder with config.json and safetensors files",
            to_do="check the path of the model",
        )
    try:
        return {name: parameter.shape for name, parameter in checkpoint_parameters(model_dir).items()}
    except TransferError as error:
        raise ConfigError(error.what, expected=error.expected, to_do="fetch the model again") from error


def _file_parameters(file: Path) -> dict[str, Parameter]:
    found: dict[str, Parameter] = {}
    try:
        # Nothing of the tensors is read; to name torch here would import it.
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                stored = opened.get_slice(name)
                found[name] = Parameter(tuple(stored.get_shape()), _dtype(file, name, stored.get_dtype()))
    except (SafetensorError, OSError) as error:
        raise TransferError(
            f"{file} is not a whole safetensors file: {error}", to_do="publish or copy the folder again"
        ) from error
    return found


def _dtype(file: Path, name: str, stored: str) -> str:
    if stored not in _DTYPES:
        raise TransferError(f"{file}: {name} has dtype {stored}", expected=f"one of {', '.join(_DTYPES)}")
    return _DTYPES[stored]
