"""An engine whose user knows vLLM's interface for weight updates only; a child of a warm process.

Called with two paths: what to do (JSON) and where to put the answers. Every deed is answered by an error text, empty if
there was none, and by what the engine says afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from rose_executor import transfer_plugin


def say(engine: LLM, prefixes: list[list[int]], top_logprobs: int) -> list[dict[int, float]]:
    """Per prefix, log-probs of the most likely next tokens by id."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=top_logprobs, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=prefix) for prefix in prefixes]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [
        {token: float(entry.logprob) for token, entry in output.outputs[0].logprobs[0].items()} for output in outputs
    ]


def worker_side(engine: LLM) -> Any:
    worker: Any = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    return worker.weight_transfer_engine


def update(engine: LLM, info: dict[str, Any]) -> None:
    engine.start_weight_update()
    engine.update_weights({"update_info": info})
    engine.finish_weight_update(weight_version=str(info["version"]))
    engine.reset_prefix_cache()


def main(task: dict[str, Any], answers: Path) -> None:
    transfer_plugin.register()
    transfer_plugin.register()
    engine = LLM(
        model=task["model"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=16 * 2**20,
        enforce_eager=True,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        weight_transfer_config={"backend": transfer_plugin.BACKEND},
    )
    told: list[dict[str, Any]] = []
    for deed, info in task["deeds"]:
        error = ""
        try:
            if deed == "init":
                engine.init_weight_transfer_engine({"init_info": info})
            elif deed == "give up":
                engine.start_weight_update()
                engine.update_weights({"update_info": info})
                worker_side(engine).start_weight_update()
                engine.finish_weight_update()
            elif deed == "update":
                update(engine, info)
        except Exception as failed:  # noqa: BLE001 - the test looks at it
            error = f"{type(failed).__name__}: {failed}"
        held = worker_side(engine).held
        told.append(
            {
                "error": error,
                "says": say(engine, task["prefixes"], task["top_logprobs"]),
                "version": engine.get_weight_version(),
                "held": None if held is None else held.version,
                "received_bytes": worker_side(engine).received_bytes,
            }
        )
    answers.write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
