"""Messages to token deltas: what to put before the model, without ever encoding again what it sampled.

Invariants
- The context of a conversation is the concatenation of its deltas and its sampled ids, in order, unless a delta
  says `starts_segment`: then that delta alone is the whole new context.
- Sampled ids are only ever decoded, never replaced. A delta continues the context only if the newly rendered
  text begins with the text of the context, character for character. A template that rewrites history (drops
  earlier reasoning, trims white space) therefore starts a new segment instead of training on tokens that the
  model never saw.
- An output that lacks the end-of-turn token (it ran into a limit) is closed by the next delta, with what the
  template closes a turn with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rose.errors import ConfigError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Delta:
    """Token ids to append to the context, or the whole new context if `starts_segment`."""

    ids: tuple[int, ...]
    starts_segment: bool = False


class ChatRenderer:
    """Renders with the chat template of a Hugging Face tokenizer.

    Raises ConfigError if the tokenizer has no chat template, or one that does not close an assistant's turn
    with a single token (the engine could not stop there).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template", expected="chat_template.jinja or chat_template in its config"
            )
        self.end_of_turn_id: int = self._find_end_of_turn()

    def open(self, system_prompt: str, observation: str) -> tuple[Conversation, Delta]:
        """Begin a conversation; the delta is its first prompt. An empty system prompt leaves the message out."""
        messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": observation})
        text = self.render(messages)
        return Conversation(self, messages, text), Delta(self.encode(text))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _find_end_of_turn(self) -> int:
        # Some templates add words of their own before an answer, so look for what follows it.
        messages: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        closing = self.encode(self.render(messages, add_generation_prompt=False).rpartition("answer")[2])
        if not closing or closing[0] not in self._tokenizer.all_special_ids:
            raise ConfigError(
                "the chat template does not close an assistant's turn with a special token",
                expected="the turn's content followed at once by such a token, as <|im_end|>",
            )
        return closing[0]


class Conversation:
    """One episode's messages and the text of its context. Call `answer` and `observe` by turns."""

    def __init__(self, renderer: ChatRenderer, messages: list[Message], text: str) -> None:
        self._renderer = renderer
        self._messages = messages
        self._text = text

    @property
    def messages(self) -> tuple[Message, ...]:
        """Every message so far, in order."""
        return tuple(self._messages)

    def answer(self, output_ids: Sequence[int]) -> str:
        """Take in what the model sampled; its text without the end-of-turn token: the action."""
        end = self._renderer.end_of_turn_id
        ended = bool(output_ids) and output_ids[-1] == end
        content = self._renderer.decode(output_ids[:-1] if ended else output_ids)
        self._text += content + (self._renderer.decode((end,)) if ended else "")
        self._messages.append({"role": "assistant", "content": content})
        return content

    def observe(self, observation: str) -> Delta:
        """Answer with the environment's text; the delta leads to the model's next turn."""
        self._messages.append({"role": "user", "content": observation})
        text = self._renderer.render(self._messages)
        known, self._text = self._text, text
        if text.startswith(known):
            return Delta(self._renderer.encode(text[len(known) :]))
        return Delta(self._renderer.encode(text), starts_segment=True)
