"""What the token route of vLLM 0.30 writes becomes what that of 0.32 would."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rose_executor.vllm_030 import as_032, extend


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from("789"))))
def test_spans_tile_what_was_kept_and_neighbours_differ(kept: list[tuple[int, str]]) -> None:
    spans: list[dict[str, Any]] = []
    for tokens, version in kept:
        extend(spans, tokens, version)
    each = [version for tokens, version in kept for _ in range(tokens)]
    assert [span["version"] for span in spans for _ in range(span["end"] - span["start"])] == each
    assert [span["version"] for span in spans] == [version for version, _ in groupby(each)]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans)][:-1]


def event(finish_reason: str | None) -> str:
    """As 0.30 writes it, with two tokens and the best one of each."""
    content = [
        {"token": f"token_id:{token}", "logprob": -0.5, "bytes": None, "top_logprobs": [
            {"token": f"token_id:{token + 1}", "logprob": -0.25, "bytes": None}
        ]}
        for token in (5, 77)
    ]  # fmt: skip
    choice = {"index": 0, "logprobs": {"content": content}, "finish_reason": finish_reason, "token_ids": [5, 77]}
    return f"data: {json.dumps({'request_id': 'r', 'choices': [choice]})}\n\n"


def test_ids_become_numbers_and_the_last_event_tells_the_versions() -> None:
    spans = [{"version": "7", "start": 0, "end": 2}]
    for finish_reason, told in ((None, None), ("length", spans)):
        text = as_032(event(finish_reason), spans)
        assert text.startswith("data: {")
        assert text.endswith("}\n\n")
        (choice,) = json.loads(text[6:])["choices"]
        assert choice["weight_versions"] == told
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"] == [5, 77]
        assert [entry["top_logprobs"][0]["token_id"] for entry in choice["logprobs"]["content"]] == [6, 78]


def test_an_event_without_an_answer_stays_as_it_is() -> None:
    for text in ("data: [DONE]\n\n", 'data: {"error": {"code": 400, "message": "too long"}}\n\n'):
        assert as_032(text, []) == text
