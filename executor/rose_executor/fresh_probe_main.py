"""The fresh engine of `fresh_probe`, in its own process: load a model folder, score prefixes, end.

Called with two paths: the question (JSON) and where to put the answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def score(question: dict[str, Any]) -> list[dict[int, float]]:
    """Per prefix, log-probs of the most likely next tokens by id."""
    prefixes: list[list[int]] = question["prefixes"]
    engine = LLM(
        model=question["model_dir"],
        dtype=question["dtype"],
        max_model_len=question["max_model_len"],
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=question["kv_cache_bytes"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=question["top_logprobs"], detokenize=False)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=prefix) for prefix in prefixes], sampling, use_tqdm=False)
    answers: list[dict[int, float]] = []
    for output in outputs:
        (position,) = output.outputs[0].logprobs
        answers.append({token: float(entry.logprob) for token, entry in position.items()})
    return answers


def main(question: Path, answer: Path) -> None:
    scores = score(json.loads(question.read_bytes()))
    answer.write_text(json.dumps(scores))
    sys.stdout.flush()
    # Everything that matters is on disk; taking the engine apart would take as long as building it.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
