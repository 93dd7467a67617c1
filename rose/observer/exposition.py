"""What a service says on /metrics, reduced to the samples that are wanted. Pure.

- Only lines with a wanted name are parsed: an engine says a thousand lines, of which a handful count here.
- Whatever the text is, parsing ends soon, and either gives samples or raises `UnreadableMetrics`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

LINES_MAX = 5000
"""Wanted lines of one service; ten times what the largest of ours says."""


class UnreadableMetrics(Exception):
    """The text is none of Prometheus' format, or has too many of the wanted samples; `str` says which."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One value under its labels."""

    labels: Mapping[str, str]
    value: float


Samples = Mapping[str, tuple[Sample, ...]]
"""By the samples' full name, such as `rose_load_ttft_seconds_bucket`."""


def parsed(text: str, wanted: Collection[str]) -> Samples:
    """The samples whose name is wanted and whose value is a number. Raises UnreadableMetrics."""
    lines = [line for line in text.split("\n") if _name(line) in wanted]
    if len(lines) > LINES_MAX:
        raise UnreadableMetrics(f"{len(lines)} samples of which at most {LINES_MAX} are read")
    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for name, labels, value, *_ in family.samples:
                if not math.isnan(value):
                    found.setdefault(name, []).append(Sample(labels, value))
    except Exception as error:  # whatever a torn line makes the parser stumble over
        raise UnreadableMetrics(f"no metrics in Prometheus' text format: {error}") from error
    return {name: tuple(samples) for name, samples in found.items()}


def _name(line: str) -> str:
    return line.partition("{")[0].partition(" ")[0]
