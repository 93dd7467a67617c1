"""What the token route of vLLM 0.30 writes becomes what that of 0.32 would."""

from __future__ import annotations

import json
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_executor.vllm_030 import Answer, extend


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


SPANS = [{"version": "7", "start": 0, "end": 2}]
DONE = "data: [DONE]\n\n"


def result(finish_reason: str | None = None, spans: Any = SPANS) -> Any:
    told = None if spans is None else {"rose_weight_versions": spans}
    output = SimpleNamespace(finish_reason=finish_reason)
    return SimpleNamespace(
        request_id="r", finished=finish_reason is not None, kv_transfer_params=told, outputs=[output]
    )


def test_ids_become_numbers_and_the_last_event_tells_the_versions() -> None:
    answer = Answer()
    for finish_reason, told in ((None, None), ("length", SPANS)):
        answer.result(result(finish_reason))
        (text,) = answer.events(event(finish_reason))
        assert text.startswith("data: {")
        assert text.endswith("}\n\n")
        (choice,) = json.loads(text[6:])["choices"]
        assert choice["weight_versions"] == told
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"] == [5, 77]
        assert [entry["top_logprobs"][0]["token_id"] for entry in choice["logprobs"]["content"]] == [6, 78]
    assert list(answer.events(DONE)) == [DONE]


def test_a_request_that_ended_without_a_word_is_given_a_last_event() -> None:
    answer = Answer()
    answer.result(result())
    assert len(list(answer.events(event(None)))) == 1
    answer.result(result("abort", spans=None))
    text, done = answer.events(DONE)
    (choice,) = json.loads(text[6:])["choices"]
    assert (choice["token_ids"], choice["finish_reason"], choice["weight_versions"]) == ([], "abort", SPANS)
    assert done == DONE


@pytest.mark.parametrize("finish_reason", [None, "error"])
def test_an_error_stays_the_last_word(finish_reason: str | None) -> None:
    answer = Answer()
    error = 'data: {"error": {"code": 400, "message": "too long"}}\n\n'
    answer.result(result(finish_reason))
    assert [*answer.events(error), *answer.events(DONE)] == [error, DONE]
