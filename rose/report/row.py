"""What every part of a report is made of: rows of numbers and words that JSON and UTF-8 can hold.

Invariants
- Numbers that are not finite become null on the way in, so no reader of the file meets NaN; text is what UTF-8 holds.
- A row never changes, refuses fields that it does not know, and takes no derived figure from a file.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator


def _plain(value: Any) -> Any:
    """The same value as JSON and UTF-8 can hold it: None for a number that is not finite, "?" for half a character."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


Number = Annotated[float | None, BeforeValidator(_plain)]
"""A measured number; None where it was not measured or not finite."""
Facts = Annotated[dict[str, JsonValue], BeforeValidator(_plain)]
"""Nested facts as JSON holds them."""
Count = Annotated[int, Field(ge=0)]
Words = Annotated[str, BeforeValidator(_plain)]
"""Text from outside: environments, models, errors."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Row(BaseModel):
    """Base of everything in a report: unknown fields are refused, derived ones dropped when a file is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_derived(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in cls.model_computed_fields}
