"""The answer that a version is published with is that of what is published, and training does not notice."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny_policy import tiny_policy

from rose.trainer.answering import known_answer, question
from rose.trainer.policy import Policy, rounded_bf16

ASKED = (3, 1, 4, 1, 5)


def greedy(policy: Policy, tokens: int) -> list[tuple[int, float]]:
    """As the library itself generates it, from keys and values."""
    made = policy.model.eval().generate(
        torch.tensor([ASKED]),
        max_new_tokens=tokens,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids = made.sequences[0, len(ASKED) :].tolist()
    return [
        (token, float(torch.log_softmax(scores[0], -1)[token])) for token, scores in zip(ids, made.scores, strict=True)
    ]


def test_it_is_the_greedy_continuation_by_the_rounded_weights_and_the_policy_stays_as_it_was() -> None:
    policy = tiny_policy(3)
    before = policy.weights()
    answer = known_answer(policy, ASKED, 6)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights().items())
    rounded = tiny_policy(3)
    rounded.load_weights(rounded_bf16(before))
    assert not all(torch.equal(before[name], tensor) for name, tensor in rounded.weights().items())
    for place, (token, logprob) in enumerate(greedy(rounded, 6)):
        assert answer.output[place] == token
        assert answer.likely[place][token] == pytest.approx(logprob, abs=1e-5)
        assert max(answer.likely[place].values()) == answer.likely[place][token]
        assert len(answer.likely[place]) == 20


def test_other_weights_answer_otherwise() -> None:
    one, other = (known_answer(tiny_policy(seed), ASKED, 4) for seed in (1, 2))
    assert one.likely != other.likely


@pytest.mark.parametrize("vocabulary", [8, 32, 258, 32_000, 151_936])
def test_a_question_is_spread_over_the_middle_of_a_vocabulary(vocabulary: int) -> None:
    asked = question(vocabulary, 40)
    assert len(asked) == 40
    assert all(vocabulary // 8 <= token < vocabulary // 2 for token in asked)
    if vocabulary > 200:
        assert all(one != other for one, other in itertools.pairwise(asked))
        assert len(set(asked)) > 30
