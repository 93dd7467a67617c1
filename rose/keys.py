"""Keys of configuration files: their sections, and words about what each takes and what is wrong with one.

Pure functions of a pydantic model whose fields are sections, whose fields are keys.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

DISAGREE = "keys_disagree"
"""Type of the error that rules between keys raise; its context holds the finished `lines`."""


class Section(BaseModel):
    """A table of keys: nothing but what it names, of exactly its type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def ports_taken_twice(ports: Mapping[str, int]) -> list[str]:
    """A line on each key whose port another one has; 0 is any free port."""
    return [
        f"{key} = {port}: allowed is any port but {other}, or 0"
        for (other, taken), (key, port) in itertools.combinations(ports.items(), 2)
        if port == taken != 0
    ]


def beside(file: Path, table: Mapping[str, object], key: str) -> dict[str, object]:
    """A path that may be left empty, as text: relative to the file whose `table` it stands in."""
    given = table.get(key)
    return {key: str(file.absolute().parent / given)} if isinstance(given, str) and given else {}


def section_of(root: type[BaseModel], name: str) -> type[BaseModel]:
    """The model of section `name`. Raises KeyError if there is none."""
    section = root.model_fields[name].annotation
    assert isinstance(section, type)
    assert issubclass(section, BaseModel)
    return section


def problems(root: type[BaseModel], error: ValidationError) -> list[str]:
    """One line on each wrong key: where, what it was, what is allowed."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        lines += detail["ctx"]["lines"] if detail["type"] == DISAGREE else [_problem(root, detail)]
    # A union reports once per type that it tried: the same line each time.
    return list(dict.fromkeys(lines))


def _problem(root: type[BaseModel], detail: ErrorDetails) -> str:
    place = [str(part) for part in detail["loc"]]
    if detail["type"] == "extra_forbidden":
        # The value is left out: the key is what is wrong, and a stray one may be a secret.
        return f"{'.'.join(place)}: {'no such section' if len(place) == 1 else 'unknown key'}{_hint(root, place)}"
    # Below a key of a section lie a table's own keys, and below those the types that a union tried.
    place = place[:3]
    key = ".".join(place)
    if detail["type"] == "missing":
        return f"{key}: missing: needs {_allowed(root, place)}"
    if detail["type"] == "value_error":  # a rule of the model's own, which says more than the kind
        return f"{key} = {_shown(detail['input'])}: {detail['ctx']['error']}"
    return f"{key} = {_shown(detail['input'])}: allowed is {_allowed(root, place)}"


def _hint(root: type[BaseModel], place: list[str]) -> str:
    sections = {name: section_of(root, name).model_fields for name in root.model_fields}
    key = place[-1]
    known = list(sections if len(place) == 1 else sections[place[0]])
    close = difflib.get_close_matches(key, known, n=1)
    owner = next((name for name, keys in sections.items() if key in keys), None)
    if close:
        return f"; did you mean {'.'.join([*place[:-1], close[0]])}?"
    if owner is not None:
        return f"; {key} is a key of [{owner}]"
    return f"; allowed are {', '.join(known)}"


def _allowed(root: type[BaseModel], place: list[str]) -> str:
    if len(place) == 1:
        return f"a table: [{place[0]}]"
    field = section_of(root, place[0]).model_fields[place[1]]
    if len(place) == 2 or get_origin(field.annotation) is list:
        return describe(field)
    return "text, a number, true or false"


def describe(field: FieldInfo) -> str:
    """What a key takes, in words: its kind and its bounds."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return " or ".join(json.dumps(choice) for choice in get_args(kind))
    if get_origin(kind) is list:
        return "a list of whole numbers"
    if get_origin(kind) is dict:
        return "a table of text, numbers, true or false"
    if kind is Path:
        return "a path"
    if kind is str:
        pattern = next((rule.pattern for rule in field.metadata if hasattr(rule, "pattern")), None)
        return "text" if pattern is None else f"text that matches `{pattern}`"
    return f"{'a whole number' if kind is int else 'a number'} {_bounds(field.metadata)}"


def _bounds(metadata: list[Any]) -> str:
    low = high = multiple = ""
    for rule in metadata:
        match rule:
            case annotated_types.Ge(ge=value):
                low = f"from {value}"
            case annotated_types.Gt(gt=value):
                low = f"above {value}"
            case annotated_types.Le(le=value):
                high = f" to {value}"
            case annotated_types.Lt(lt=value):
                high = f" to below {value}"
            case annotated_types.MultipleOf(multiple_of=value):
                multiple = f", a multiple of {value}"
    return low + high + multiple


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
