"""The reference page of the job file, made from the model that checks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from rose.config import Job
from rose.keys import describe, section_of

_HEAD = """\
# Job file

A job is a TOML file: `rose run job.toml`. This page is the output of `rose job-file`.

Unknown keys are refused, and every wrong key is named at once with its value and what is allowed. Relative paths
are relative to the job file. `rose run job.toml --dry-run` prints the job with all defaults filled in and checks
this machine against it.

Results go to `run.out`. While it goes, a run keeps its sockets, its weight versions and its status in a runtime
folder that nobody else may use: below `$ROSE_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/rose`, else `/dev/shm/rose-<uid>`,
else `rose-<uid>` in the folder for temporary files. Set the first for models that memory does not hold; keep it
short, since a socket's path has at most 107 bytes. `rose status` looks in the same place.

The smallest job (a checkout has a model to begin with: `path = "rose/demo/warmstart/model"`):

```toml
[run]
name = "first"

[model]
path = "models/my-model"

[environment]
kind = "frozen_lake"
```
"""


def job_page() -> str:
    """Markdown: one table per section, one row per key."""
    return "\n".join([_HEAD, *_sections()])


def _sections() -> Iterator[str]:
    for name in Job.model_fields:
        section = section_of(Job, name)
        rows = "".join(_row(key, field) for key, field in section.model_fields.items())
        yield f"## [{name}]\n\n{section.__doc__}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n{rows}"


def _row(key: str, field: FieldInfo) -> str:
    cells = (f"`{key}`", _default(field), describe(field).replace("|", "\\|"), field.description or "")
    return f"| {' | '.join(cells)} |\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, dict):
        return "empty"
    return f"`{json.dumps(str(default) if isinstance(default, Path) else default)}`"
