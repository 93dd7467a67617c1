"""The traces that come with ROSE; `traces/README.md` says where each is from and what was done to it."""

from __future__ import annotations

from pathlib import Path

from rose.errors import ConfigError
from rose.workload.trace import Trace
from rose.workload.trace_files import read_trace

FOLDER = Path(__file__).with_name("traces")
ATTRIBUTIONS = {
    "azure_2023_code": "Azure LLM inference trace 2023, code (Patel et al., Splitwise, ISCA 2024), CC-BY 4.0",
    "azure_2023_conv": "Azure LLM inference trace 2023, conversation (Patel et al., Splitwise, ISCA 2024), CC-BY 4.0",
}


def shipped_trace(name: str) -> Trace:
    """Raises ConfigError if none has that name."""
    if name not in ATTRIBUTIONS:
        raise ConfigError(f"no shipped trace {name!r}", expected=f"one of {', '.join(ATTRIBUTIONS)}")
    return read_trace(FOLDER / f"{name}.csv.gz", name=name, attribution=ATTRIBUTIONS[name])


def named_trace(name_or_path: str) -> Trace:
    """A shipped trace by its name, or the trace in a file. Raises ConfigError if it is neither."""
    if name_or_path in ATTRIBUTIONS:
        return shipped_trace(name_or_path)
    return read_trace(Path(name_or_path))
