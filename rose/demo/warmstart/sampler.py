"""A small sampler on the trainer's own model: all episodes in lockstep, for checks that start no engine.

Rows of one batch have texts of different lengths, so every chunk is padded on the right and the padding stays
in the key-value cache as holes that the attention mask leaves out; positions are counted without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rose.env.chat import ChatRenderer, Conversation
from rose.env.contract import Environment, EnvironmentFactory, StepResult
from rose.records import Finish, Outcome, Purpose, Trajectory, Turn, VersionSpan
from rose.trainer.policy import Policy

MAX_NEW_TOKENS = 6
"""Per turn; a well-formed action takes four."""


@torch.no_grad()
def play_episodes(
    policy: Policy,
    renderer: ChatRenderer,
    make: EnvironmentFactory,
    seeds: Sequence[int],
    chance: torch.Generator,
    *,
    temperature: float = 1.0,
    version: int = 0,
) -> list[Trajectory]:
    """One trajectory per entry of `seeds`; equal seeds are attempts of one group. Temperature 0 is greedy.

    For plain (not async) environments that do not fail; contexts must fit the model.
    """
    episodes = [_Episode.begin(renderer, make(), seed, attempt) for attempt, seed in enumerate(seeds)]
    live = list(episodes)
    context = _RaggedContext(policy.model, len(live))
    while live:
        logits_BV = context.append([episode.pending for episode in live])
        drawn = _sample_turns(context, logits_BV, renderer.end_of_turn_id, temperature, chance)
        for episode, (output_ids, logprobs) in zip(live, drawn, strict=True):
            episode.take_turn(output_ids, logprobs, version, renderer.end_of_turn_id)
        kept = [row for row, episode in enumerate(live) if not episode.result.over]
        live = [live[row] for row in kept]
        context.keep(kept)
    return [episode.finish() for episode in episodes]


def _sample_turns(
    context: _RaggedContext, logits_BV: Tensor, end_id: int, temperature: float, chance: torch.Generator
) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probs of one turn per row. Every sampled token is also appended to the context."""
    turns: list[tuple[list[int], list[float]]] = [([], []) for _ in range(logits_BV.shape[0])]
    for _ in range(MAX_NEW_TOKENS):
        logprob_BV = torch.log_softmax(logits_BV / (temperature or 1.0), dim=-1)
        if temperature:
            token_B = torch.multinomial(logprob_BV.exp(), 1, generator=chance)[:, 0]
        else:
            token_B = logprob_BV.argmax(-1)
        chosen = logprob_BV.gather(1, token_B[:, None])[:, 0].tolist()
        chunk: list[list[int]] = []
        for (ids, logprobs), token, logprob in zip(turns, token_B.tolist(), chosen, strict=True):
            open_ = not ids or ids[-1] != end_id
            chunk.append([token] if open_ else [])
            if open_:
                ids.append(token)
                logprobs.append(logprob)
        logits_BV = context.append(chunk)
        if all(ids[-1] == end_id for ids, _ in turns):
            break
    return turns


class _RaggedContext:
    """The key-value cache of B rows whose contexts grow by chunks of different lengths."""

    def __init__(self, model: Any, rows: int) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._mask_BT = torch.zeros((rows, 0), dtype=torch.int64)

    def append(self, chunks: Sequence[Sequence[int]]) -> Tensor:
        """Append one chunk per row; logits (B, vocabulary) after each row's last new token.

        A row with an empty chunk appends nothing, and its logits mean nothing.
        """
        width = max(map(len, chunks))
        length_B = torch.tensor([len(chunk) for chunk in chunks])
        ids_BT = torch.tensor([[*chunk, *[0] * (width - len(chunk))] for chunk in chunks])
        known_B = self._mask_BT.sum(1)
        new_BT = (torch.arange(width)[None] < length_B[:, None]).long()
        self._mask_BT = torch.cat([self._mask_BT, new_BT], dim=1)
        hidden_BTD = self._model.base_model(
            input_ids=ids_BT,
            attention_mask=self._mask_BT,
            position_ids=known_B[:, None] + torch.arange(width)[None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        last_BD = hidden_BTD[torch.arange(len(chunks)), (length_B - 1).clamp(min=0)]
        logits_BV: Tensor = self._model.get_output_embeddings()(last_BD)
        return logits_BV

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        if len(rows) < self._mask_BT.shape[0]:
            index = torch.tensor(rows, dtype=torch.int64)
            self._mask_BT = self._mask_BT[index]
            self._cache.batch_select_indices(index)


@dataclass(slots=True)
class _Episode:
    environment: Environment
    conversation: Conversation
    seed: int
    attempt: int
    pending: tuple[int, ...]
    result: StepResult = field(default_factory=lambda: StepResult("", 0.0, False, False))
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    malformed: int = 0

    @classmethod
    def begin(cls, renderer: ChatRenderer, environment: Environment, seed: int, attempt: int) -> _Episode:
        observation = environment.reset(seed, str(attempt))
        assert isinstance(observation, str)
        conversation, delta = renderer.open(environment.system_prompt, observation)
        return cls(environment, conversation, seed, attempt, delta.ids)

    def take_turn(self, output_ids: list[int], logprobs: list[float], version: int, end_id: int) -> None:
        finish = Finish.STOP if output_ids[-1] == end_id else Finish.LENGTH
        span = VersionSpan(version, 0, len(output_ids))
        self.turns.append(Turn(self.pending, tuple(output_ids), tuple(logprobs), (span,), finish))
        result = self.environment.step(self.conversation.answer(output_ids))
        assert isinstance(result, StepResult)
        self.result = result
        self.reward += result.reward
        self.malformed += result.malformed
        self.pending = self.conversation.observe(result.observation).ids

    def finish(self) -> Trajectory:
        self.environment.close()
        return Trajectory(
            trajectory_id=f"{self.seed}-{self.attempt}",
            group_id=str(self.seed),
            task_seed=self.seed,
            purpose=Purpose.TRAIN,
            turns=tuple(self.turns),
            reward=self.reward,
            success=self.result.success,
            outcome=Outcome.COMPLETED,
            malformed_actions=self.malformed,
        )
