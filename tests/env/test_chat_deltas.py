from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import rose.demo.warmstart
from rose.env.chat import ChatRenderer
from rose.errors import ConfigError

MODEL = Path(rose.demo.warmstart.__file__).parent / "model"
# Drops the reasoning of earlier answers, as the templates of reasoning models do.
FORGETFUL = """\
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content.split('!')[-1] if m.role == 'assistant' else m.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
TRIMMING = FORGETFUL.replace(".split('!')[-1]", " | trim")


def tokenizer(template: str | None = None) -> Any:
    loaded = AutoTokenizer.from_pretrained(MODEL)
    if template is not None:
        loaded.chat_template = template
    return loaded


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(tokenizer())


plain_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>|"), max_size=40)
# White space at the start of an answer would join the prompt's newline in one token of the whole text.
answers = st.one_of(
    st.sampled_from(["left", "down", "right", "up"]).map(lambda move: f"<action>{move}</action>"),
    plain_text.filter(lambda text: text[:1].strip() != ""),
)


@settings(max_examples=60, deadline=None)
@given(plain_text, plain_text, st.lists(st.tuples(answers, plain_text), max_size=5))
def test_deltas_of_canonical_answers_are_the_encoding_of_the_whole(
    system: str, first: str, turns: list[tuple[str, str]]
) -> None:
    chat = renderer()
    conversation, delta = chat.open(system, first)
    ids = list(delta.ids)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": first})
    for answer, observation in turns:
        sampled = (*chat.encode(answer), chat.end_of_turn_id)
        assert conversation.answer(sampled) == answer
        delta = conversation.observe(observation)
        assert not delta.starts_segment
        ids += [*sampled, *delta.ids]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    assert ids == list(chat.encode(chat.render(messages)))


@settings(max_examples=60, deadline=None)
@given(plain_text, st.lists(st.tuples(st.lists(st.integers(0, 338), max_size=8), plain_text), min_size=1, max_size=4))
def test_whatever_was_sampled_the_context_reads_as_the_rendered_text(
    first: str, turns: list[tuple[list[int], str]]
) -> None:
    chat = renderer()
    conversation, delta = chat.open("", first)
    ids = list(delta.ids)
    messages = [{"role": "user", "content": first}]
    for sampled, observation in turns:
        text = conversation.answer(sampled)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
        delta = conversation.observe(observation)
        ids = list(delta.ids) if delta.starts_segment else [*ids, *sampled, *delta.ids]
        assert chat.decode(ids) == chat.render(messages)


def test_an_output_without_its_end_is_closed_by_the_next_delta() -> None:
    chat = renderer()
    ended, _ = chat.open("", "o")
    cut, _ = chat.open("", "o")
    sampled = chat.encode("<action>right")
    assert cut.answer(sampled) == ended.answer((*sampled, chat.end_of_turn_id)) == "<action>right"
    closed = cut.observe("next")
    assert closed.ids == (chat.end_of_turn_id, *ended.observe("next").ids)
    assert not closed.starts_segment


def test_an_empty_output_is_closed_too() -> None:
    chat = renderer()
    conversation, _ = chat.open("", "o")
    assert conversation.answer(()) == ""
    assert conversation.observe("next").ids[0] == chat.end_of_turn_id


def test_a_non_canonical_answer_stays_as_sampled() -> None:
    chat = renderer()
    conversation, first = chat.open("", "o")
    spelled = tuple(id_ for letter in "right" for id_ in chat.encode(letter))
    assert spelled != chat.encode("right")
    assert conversation.answer((*spelled, chat.end_of_turn_id)) == "right"
    delta = conversation.observe("next")
    assert not delta.starts_segment
    whole = (*first.ids, *spelled, chat.end_of_turn_id, *delta.ids)
    assert chat.decode(whole).endswith("right<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("template", "answer"), [(FORGETFUL, "because!up"), (TRIMMING, "up "), (TRIMMING, " up")])
def test_a_template_that_rewrites_history_starts_a_segment(template: str, answer: str) -> None:
    chat = ChatRenderer(tokenizer(template))
    conversation, _ = chat.open("", "o")
    conversation.answer((*chat.encode(answer), chat.end_of_turn_id))
    delta = conversation.observe("next")
    assert delta.starts_segment
    expected = "".join(f"<|im_start|>{part}<|im_end|>\n" for part in ("user\no", "assistant\nup", "user\nnext"))
    assert chat.decode(delta.ids) == f"{expected}<|im_start|>assistant\n"
    conversation.answer((*chat.encode("up"), chat.end_of_turn_id))
    assert not conversation.observe("more").starts_segment


def test_an_end_token_that_is_not_the_templates_belongs_to_the_answer() -> None:
    chat = renderer()
    conversation, _ = chat.open("", "o")
    end_of_text = chat.encode("<|endoftext|>")
    conversation.answer((*chat.encode("up"), *end_of_text))
    # The token is part of the answer, and the template closes the turn behind it.
    assert conversation.observe("next").ids[0] == chat.end_of_turn_id


def test_a_template_that_adds_words_before_an_answer_is_understood() -> None:
    thinking = FORGETFUL.replace("{{ m.role }}\n", "{{ m.role }}\n{{ '<think></think>' if m.role == 'assistant' }}")
    assert ChatRenderer(tokenizer(thinking)).end_of_turn_id == renderer().end_of_turn_id


@pytest.mark.parametrize(
    ("template", "named"), [("", "no chat template"), (FORGETFUL.replace("<|im_end|>", "."), "special token")]
)
def test_a_tokenizer_that_cannot_chat_is_refused(template: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ChatRenderer(tokenizer(template))
