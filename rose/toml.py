"""TOML: reading with errors in plain words, and the writing that the standard library leaves out."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.small_file import read_small_file

FILE_BYTES_MAX = 1 << 20
NESTING_MAX = 32
_INT_BITS = 64
_DIGITS_MAX = 4300
"""More than Python turns into a number: it would say so without a line."""
_LONG_NUMBER = re.compile(rf"[0-9](?:_?[0-9]){{{_DIGITS_MAX},}}")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read(file: Path, expected: str) -> dict[str, Any]:
    """The tables of a file of at most `FILE_BYTES_MAX` bytes. Raises ConfigError, which says what was `expected`."""
    raw = read_small_file(file, FILE_BYTES_MAX, expected).content
    try:
        return loads(raw.decode("utf-8-sig"))  # some editors begin every file with a byte order mark
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        what = f"{file}: line {line} is not UTF-8 text"
        raise ConfigError(what, expected=expected, to_do="save it as UTF-8") from None
    except ValueError as error:
        raise ConfigError(f"{file}: not TOML: {error}", expected=expected, to_do="mend that line") from None


def loads(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError in words for whoever wrote it, with the line where it is known."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"tables or lists are nested more than {NESTING_MAX} deep") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        number = _LONG_NUMBER.search(text)
        line = f" (at line {text[: number.start()].count(chr(10)) + 1})" if number else ""
        raise ValueError(f"a number has more than {_DIGITS_MAX} digits{line}") from None
    _check_bounds(found)
    return found


def _check_bounds(table: dict[str, Any]) -> None:
    """What readers of the tables may rely on: 64-bit integers, as TOML says, and a depth that recursion survives."""
    left: list[tuple[str, int, object]] = [("", 0, table)]
    while left:
        place, depth, value = left.pop()
        if depth > NESTING_MAX:
            raise ValueError(f"tables or lists are nested more than {NESTING_MAX} deep, in {place.split('.')[0]}")
        match value:
            case dict():
                left += [(f"{place}.{key}" if place else str(key), depth + 1, inner) for key, inner in value.items()]
            case list():
                left += [(place, depth + 1, inner) for inner in value]
            case int() if not -(1 << _INT_BITS - 1) <= value < 1 << _INT_BITS - 1:
                raise ValueError(f"the integer of {place[:80]} does not fit {_INT_BITS} bits")


def dumps(tables: Mapping[str, Mapping[str, object]]) -> str:
    """TOML text of named tables, whose values are text, paths, numbers, booleans, lists of those or tables of those.

    `tomllib.loads` reads back equal values (paths as text). Raises TypeError on any other value.
    """
    return "\n".join(_table(_key(name), values) for name, values in tables.items())


def _table(name: str, values: Mapping[str, object]) -> str:
    text = f"[{name}]\n"
    inner = ""
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner += f"\n{_table(f'{name}.{_key(key)}', value)}"
        else:
            text += f"{_key(key)} = {_scalar(value)}\n"
    return text + inner


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _scalar(key)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    if not isinstance(value, str | Path):
        raise TypeError(f"no TOML for {type(value).__name__}: {value!r}")
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
