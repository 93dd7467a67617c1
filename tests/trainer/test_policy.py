from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_policy import a_trajectory, tiny_policy

import rose.demo.warmstart
from rose.errors import ConfigError
from rose.trainer.batch import pad
from rose.trainer.policy import changed_fraction, load_policy, load_tokenizer, rounded_bf16

MODEL = Path(rose.demo.warmstart.__file__).parent / "model"


def test_scores_equal_the_full_models_own_logits_row_by_row() -> None:
    policy = tiny_policy()
    draw = random.Random(3)
    segments = [part for _ in range(5) for part in a_trajectory(draw, 0.0).segments()]
    for temperature in (1.0, 0.7):
        scores = policy.score(pad(segments), temperature)
        expected, entropies = [], []
        for segment in segments:
            logits = policy.model(torch.tensor([segment.token_ids])).logits[0] / temperature
            every = torch.log_softmax(logits, -1)
            for start, end in segment.outputs:
                for position in range(start, end):
                    expected.append(every[position - 1, segment.token_ids[position]])
                    entropies.append(-(every[position - 1].exp() * every[position - 1]).sum())
        # Matrix kernels sum in another order for another shape, and in one that depends on the processor.
        rounding = 16 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(scores.logprob_N, torch.stack(expected), atol=1e-6, rtol=rounding)
        torch.testing.assert_close(scores.entropy_N, torch.stack(entropies), atol=1e-5, rtol=0)


def test_weights_go_by_hugging_face_names_tied_ones_once() -> None:
    weights = load_policy(MODEL).weights()
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in weights.values()) == 492_608


def test_weights_are_a_copy_and_load_back() -> None:
    policy = tiny_policy()
    before = policy.weights()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert changed_fraction(before, policy.weights()) == 1.0
    policy.load_weights(rounded_bf16(before))
    assert changed_fraction(before, policy.weights()) == 0.0


def test_a_wrong_shape_or_missing_name_sets_nothing() -> None:
    policy = tiny_policy()
    before = policy.weights()
    last = list(before)[-1]
    ones = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    with pytest.raises(RuntimeError, match=last):
        policy.load_weights({**ones, last: torch.ones(3)})
    with pytest.raises(KeyError, match=last):
        policy.load_weights({name: tensor for name, tensor in ones.items() if name != last})
    assert changed_fraction(before, policy.weights()) == 0.0


def test_the_changed_fraction_counts_bits_of_bfloat16() -> None:
    before = {"a": torch.tensor([1.0, 1.0, 0.0, 2.0])}
    # 1.001 rounds to 1.0; a sign of zero is a bit.
    after = {"a": torch.tensor([1.001, 1.5, -0.0, 2.0])}
    assert changed_fraction(before, after) == 0.5
    assert changed_fraction({}, {}) == 0.0


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (_without("config.json"), "lacks config.json"),
        (_without("model.safetensors"), r"lacks \*.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": "x"})), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08garbage"), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot be loaded"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_a_folder_that_is_no_model_says_what_is_wrong(
    break_it: Callable[[Path], None], named: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    break_it(folder)
    with pytest.raises(ConfigError, match=named):
        load_policy(folder)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    more = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    with pytest.raises(ConfigError, match="lack 11 tensors"):
        load_policy(folder)


def test_a_file_or_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        load_policy(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
