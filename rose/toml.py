"""TOML writing, the half that the standard library leaves out: tables of scalars and of tables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(tables: Mapping[str, Mapping[str, object]]) -> str:
    """TOML text of named tables, whose values are text, paths, numbers, booleans or tables of those.

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
    if not isinstance(value, str | Path):
        raise TypeError(f"no TOML for {type(value).__name__}: {value!r}")
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
