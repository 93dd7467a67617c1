"""An engine whose user knows vLLM's interface for weight updates only; a child of a warm process.

Called with two paths: what to do (JSON) and where to put the answers. Every deed is answered by an error text, empty if
there was none, and by what the engine says afterwards.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from rose.errors import TransferError
from rose_executor import transfer_plugin
from rose_executor.engine_model import ModelSource
from rose_executor.engine_rank import EngineRank
from rose_executor.layout_trace import trace_layout
from rose_transfer.layout.checkpoint import checkpoint_parameters
from rose_transfer.layout.layout_json import to_json
from rose_transfer.live import Mixed, RolledBack
from rose_transfer.store.roles import Role, hold_alone

LEAVES = {"stumble": "old", "fall": "nobody knows", "break": "mixed"}


def say(engine: LLM, prefixes: list[list[int]], top_logprobs: int) -> list[dict[int, float]]:
    """Per prefix, log-probs of the most likely next tokens by id; nothing where the engine takes no request."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=top_logprobs, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=prefix) for prefix in prefixes]
    try:
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
    except TransferError:
        return []
    return [
        {token: float(entry.logprob) for token, entry in output.outputs[0].logprobs[0].items()} for output in outputs
    ]


def facts(worker: Any) -> dict[str, Any]:
    """Of one worker, asked in its own process."""
    ours = worker.weight_transfer_engine
    held = None if ours.held is None else ours.held.version
    return {"held": held, "received_bytes": ours.received_bytes, "folder": str(ours._folder)}


def shared(worker: Any) -> list[str]:
    """The files of shared memory by which this worker is spoken to, and the workers speak to each other."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in lines if re.search("/dev/shm/(psm|vllm_dist)_", line)})


def forget(worker: Any) -> None:
    worker.weight_transfer_engine.start_weight_update()


def is_last(worker: Any) -> bool:
    return bool(worker.rank + 1 == worker.parallel_config.world_size)


def tamper(worker: Any, by: float) -> None:
    """The weights of the last worker change behind the backend's back."""
    if is_last(worker):
        with torch.no_grad():
            dict(worker.model_runner.model.named_parameters())["model.norm.weight"].add_(by)


def move(worker: Any, by: float) -> None:
    """The weights of the last worker are given other memory, as an offload and return does, and change there."""
    if is_last(worker):
        for parameter in worker.model_runner.model.parameters():
            parameter.data = parameter.data.clone()
        tamper(worker, by)


def turn_away(worker: Any, address: str) -> None:
    """The last worker fetches from another server than the others."""
    if is_last(worker):
        ours = worker.weight_transfer_engine
        ours._from = replace(ours._from, address=address)


def stumble(worker: Any, leaves: str) -> None:
    """The last worker fails once to commit what is staged; that `leaves` one of `LEAVES`."""
    update = worker.weight_transfer_engine._staged.update
    if not is_last(worker):
        return

    def fail_once() -> NoReturn:
        del update.commit
        if leaves == "mixed":
            update.commit()
        raise {"old": RolledBack, "mixed": Mixed, "nobody knows": TransferError}[leaves]("this worker stumbled")

    update.commit = fail_once


def update(engine: LLM, info: dict[str, Any]) -> None:
    engine.start_weight_update()
    engine.update_weights({"update_info": info})
    engine.finish_weight_update(weight_version=str(info["version"]))
    engine.reset_prefix_cache()


def update_each(engine: LLM, infos: list[dict[str, Any]]) -> None:
    """Each worker is told something else."""
    engine.start_weight_update()
    engine.update_weights({"update_info": infos})
    engine.finish_weight_update(weight_version=str(infos[0]["version"]))
    engine.reset_prefix_cache()


def trace(model: Path, sizes: list[int], answers: Path) -> None:
    """The layouts of all workers of engines of these sizes."""
    source = ModelSource(model, checkpoint_parameters(model), torch.float32)
    ranks = [EngineRank(size, rank) for size in sizes for rank in range(size)]
    answers.write_text(json.dumps([to_json(trace_layout(str(rank), source, rank)) for rank in ranks]))


def live(task: dict[str, Any], answers: Path) -> None:
    """Do what is asked, one deed after the other."""
    transfer_plugin.register()  # vLLM itself does so again, where it loads plugins
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
        tensor_parallel_size=task["workers"],
        distributed_executor_backend="uni" if task["workers"] == 1 else "mp",
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
                engine.collective_rpc(forget)
                engine.finish_weight_update()
            elif deed in LEAVES:
                engine.start_weight_update()
                engine.update_weights({"update_info": info})
                engine.collective_rpc(stumble, args=(LEAVES[deed],))
                engine.finish_weight_update(weight_version=str(info["version"]))
            elif deed == "tamper":
                engine.collective_rpc(tamper, kwargs=info)
                engine.reset_prefix_cache()
            elif deed == "move":
                engine.collective_rpc(move, kwargs=info)
                engine.reset_prefix_cache()
            elif deed == "move while staged":
                engine.start_weight_update()
                engine.update_weights({"update_info": info})
                engine.collective_rpc(move, kwargs={"by": 0.5})
                engine.finish_weight_update(weight_version=str(info["version"]))
            elif deed == "turn away":
                engine.collective_rpc(turn_away, kwargs=info)
            elif deed == "update each":
                update_each(engine, info["infos"])
            elif deed == "reload":
                engine.collective_rpc("reload_weights")
                engine.reset_prefix_cache()
            elif deed == "finish with nothing":
                engine.start_weight_update()
                engine.finish_weight_update(weight_version=info["label"])
            elif deed == "update on":
                engine.update_weights({"update_info": info})
                engine.finish_weight_update(weight_version=str(info["version"]))
                engine.reset_prefix_cache()
            elif deed == "start":
                engine.start_weight_update()
            elif deed == "stage":
                engine.start_weight_update()
                engine.update_weights({"update_info": info})
            elif deed == "remove":
                shutil.rmtree(info["folder"])
            elif deed == "take":
                os.close(hold_alone(Path(info["folder"]), Role.ENGINE))
            elif deed == "label":
                engine.update_weight_version(info["label"])
            elif deed == "update without a label":
                engine.start_weight_update()
                engine.update_weights({"update_info": info})
                engine.finish_weight_update()
                engine.reset_prefix_cache()
            elif deed == "finish":
                engine.finish_weight_update(weight_version=str(info["version"]))
                engine.reset_prefix_cache()
            else:
                update(engine, info)
        except Exception as failed:  # noqa: BLE001 - the test looks at it
            error = f"{type(failed).__name__}: {failed}"
        says = say(engine, task["prefixes"], task["top_logprobs"])
        version = engine.get_weight_version()
        told.append({"error": error, "says": says, "version": version, "workers": engine.collective_rpc(facts)})
    answers.write_text(json.dumps(told))
    end(engine)


def end(engine: LLM) -> None:
    """What a process that just leaves has in shared memory stays there for good."""
    made = {Path(file) for files in engine.collective_rpc(shared) for file in files}
    engine.llm_engine.engine_core.shutdown()
    gc.collect()  # a queue's file is removed with the object
    for file in made:
        if file.name.startswith("vllm_dist_"):  # workers that were forked never come to remove theirs
            file.unlink(missing_ok=True)
    left = [file for file in made if file.exists()]
    assert not left, left


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    if "trace" in asked:
        trace(Path(asked["model"]), asked["trace"], Path(sys.argv[2]))
    else:
        live(asked, Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
