"""The policy in the trainer: a Hugging Face causal language model in float32.

Invariants
- Parameters are float32; what an engine gets is `rounded_bf16`, so an engine in float32 can be held to 1e-4.
- Parameters go by their Hugging Face names, tied ones once, under the name that the model lists first.
- Logits are computed only where a sampled token is predicted: a trajectory is mostly observations, and the
  vocabulary is the widest matrix of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from rose.errors import ConfigError
from rose.trainer.batch import Batch

Weights = dict[str, Tensor]
"""Parameters by Hugging Face name."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """The policy's view of N sampled tokens, float32, in the order of `Batch.target_N`.

    `logprob_N` has a gradient; `entropy_N` (nats, of the whole distribution at that position) has none.
    """

    logprob_N: Tensor
    entropy_N: Tensor


class Policy:
    """A causal language model whose tokens can be scored and whose parameters can be read and set."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._backbone: Any = model.base_model
        self._head: Any = model.get_output_embeddings()  # type: ignore[operator]

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        return self._model.named_parameters()

    def parameters(self) -> list[Parameter]:
        return list(self._model.parameters())

    @property
    def model(self) -> Any:
        """The Hugging Face model itself, for saving and sampling."""
        return self._model

    @property
    def vocabulary(self) -> int:
        """How many ids the model has an embedding for."""
        return int(self._model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]

    def logits_at(self, ids_BT: Tensor, row_N: Tensor, column_N: Tensor) -> Tensor:
        """Next-token logits (N, vocabulary) after the tokens at (row, column) of right-padded `ids_BT`.

        No attention mask: padding stands on the right, and causal attention never looks there.
        """
        hidden_BTD: Tensor = self._backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
        logits_NV: Tensor = self._head(hidden_BTD[row_N, column_N])
        return logits_NV

    def score(self, batch: Batch, temperature: float = 1.0) -> TokenScores:
        """Log-probs of the sampled tokens of a batch, at the temperature they were sampled with."""
        logits_NV = self.logits_at(batch.ids_BT, batch.row_N, batch.column_N)
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        all_NV = torch.log_softmax(logits_NV, dim=-1)
        with torch.no_grad():
            entropy_N = -(all_NV.exp() * all_NV).sum(-1)
        return TokenScores(all_NV.gather(1, batch.target_N[:, None])[:, 0], entropy_N)

    def weights(self) -> Weights:
        """A copy of all parameters, float32."""
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set all parameters, converted to float32.

        Raises KeyError if a name is missing and RuntimeError if a shape differs, before anything is set.
        """
        own = dict(self.named_parameters())
        for name, parameter in own.items():
            if weights[name].shape != parameter.shape:
                raise RuntimeError(f"{name} has shape {tuple(weights[name].shape)}, not {tuple(parameter.shape)}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])


def load_policy(path: Path) -> Policy:
    """Load a Hugging Face folder (config.json and *.safetensors) in float32.

    Raises ConfigError if the folder is no model, saying what is missing or broken.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    _check_model_folder(path)
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model folder {path} cannot be loaded: {error}") from error
    # The library would fill what is missing with random numbers and go on.
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(
            f"the weights in {path} lack {len(missing)} tensors that config.json asks for, such as {missing[0]}"
        )
    model.train()
    return Policy(model)


def load_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer of a model folder. Raises ConfigError if there is none."""
    from transformers import AutoTokenizer

    if not path.is_dir() or not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ConfigError(f"model folder {path} has no tokenizer", expected="tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the tokenizer in {path} cannot be loaded: {error}") from error


def _check_model_folder(path: Path) -> None:
    expected = "a Hugging Face model folder with config.json and *.safetensors"
    if not path.exists():
        raise ConfigError(f"model folder {path} does not exist", expected=expected)
    if not path.is_dir():
        raise ConfigError(f"model folder {path} is a file", expected=expected)
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"model folder {path} lacks {' and '.join(missing)}", expected=expected)


def rounded_bf16(weights: Mapping[str, Tensor]) -> Weights:
    """Each tensor rounded to bfloat16 (nearest, ties to even): what is published."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}


def changed_fraction(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    """Share of elements whose bfloat16 bits differ between two versions of the same parameters, 0 to 1."""
    changed = total = 0
    for name, old in before.items():
        old_bits, new_bits = (tensor.to(torch.bfloat16).view(torch.int16) for tensor in (old, after[name]))
        changed += int((old_bits != new_bits).sum())
        total += old.numel()
    return changed / total if total else 0.0
