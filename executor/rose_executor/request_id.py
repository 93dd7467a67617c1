"""The id that a client gave a request, from the one that vLLM uses inside.

vLLM's token route turns `<id>` into `generate-tokens-<id>-<8 hex digits>`.
"""

from __future__ import annotations

import re

_INTERNAL_ID = re.compile(r"(?:generate-tokens-)?(.+)-[0-9a-f]{8}", re.DOTALL)


def external_request_id(internal: str) -> str:
    """The client's id; one that vLLM did not make comes back unchanged."""
    match = _INTERNAL_ID.fullmatch(internal)
    return match[1] if match else internal
