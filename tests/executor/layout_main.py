"""Traces and certifies small twins of models in one process that imports vLLM once; writes what it found as JSON.

Called with a folder to work in. A failure of any case is its entry's "error", never silence.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose_executor.engine_env import IMPORT_ENV

os.environ.update(IMPORT_ENV)

import dataclasses
from unittest import mock

import torch
import transformers
from live_ranks import bring_ranks
from transformers.core_model_loading import revert_weight_conversion
from vllm import ModelRegistry
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from rose.errors import TransferError
from rose_executor import layout_discovery, vllm_plugin
from rose_executor.engine_model import ModelSource
from rose_executor.engine_rank import EngineRank
from rose_executor.layout_certificate import certify, relaid
from rose_executor.layout_trace import trace_layout
from rose_transfer.layout.holdings import check_engine, replication
from rose_transfer.layout.layout import Layout, Parameter
from rose_transfer.layout.layout_cache import LayoutCache
from rose_transfer.layout.layout_json import fingerprint, to_json

HIDDEN, LAYERS, VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS = 64, 2, 1003, 8, 2, 8, 96, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MOE = {
    "moe_intermediate_size": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **SIZES, **changes}


TWINS: dict[str, dict[str, Any]] = {
    "qwen2": config("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True),
    "qwen3": config("Qwen3ForCausalLM", "qwen3", tie_word_embeddings=True),
    "llama": config("LlamaForCausalLM", "llama", tie_word_embeddings=False),
    "qwen3_moe": config("Qwen3MoeForCausalLM", "qwen3_moe", tie_word_embeddings=False, **MOE),
}


_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# Transposed matrices; projections that are fused in the checkpoint; latent attention with a bias in its router;
# stacks of experts whose rows are interleaved.
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, architectures=["GPT2LMHeadModel"]
    ),
    "phi3": lambda: transformers.Phi3Config(
        **_COMMON, num_key_value_heads=KV_HEADS, eos_token_id=1, architectures=["Phi3ForCausalLM"]
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_COMMON,
        num_key_value_heads=HEADS,
        moe_intermediate_size=32,
        n_routed_experts=EXPERTS,
        n_group=2,
        topk_group=1,
        topk_method="noaux_tc",
        num_experts_per_tok=2,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        architectures=["DeepseekV3ForCausalLM"],
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_local_experts=4,
        eos_token_id=1,
        architectures=["GptOssForCausalLM"],
    ),
}


def checkpoint(twin: dict[str, Any], *, head: bool) -> dict[str, Parameter]:
    """The tensors of a checkpoint of this model, named as Hugging Face names them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, size in rows.items():
            shapes[f"{block}.self_attn.{name}_proj.weight"] = (size, HIDDEN)
            if twin["model_type"] == "qwen2":
                shapes[f"{block}.self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{block}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        if twin["model_type"].startswith("qwen3"):
            shapes |= {f"{block}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        experts = [f"experts.{e}." for e in range(EXPERTS)] if "num_experts" in twin else [""]
        inner = twin.get("moe_intermediate_size", INNER)
        for expert in experts:
            shapes |= {f"{block}.mlp.{expert}{name}_proj.weight": (inner, HIDDEN) for name in ("gate", "up")}
            shapes[f"{block}.mlp.{expert}down_proj.weight"] = (HIDDEN, inner)
        if "num_experts" in twin:
            shapes[f"{block}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        shapes |= {f"{block}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (HIDDEN,)
    if head:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return {name: Parameter(shape, "bfloat16") for name, shape in shapes.items()}


class Workshop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def source(self, twin: dict[str, Any], *, head: bool, dtype: torch.dtype = torch.bfloat16) -> ModelSource:
        return self.source_of(twin, checkpoint(twin, head=head), dtype)

    def source_of(
        self, twin: dict[str, Any], parameters: dict[str, Parameter], dtype: torch.dtype = torch.bfloat16
    ) -> ModelSource:
        folder = self.folder / twin["architectures"][0]
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(twin, default=str))
        return ModelSource(folder, parameters, dtype)

    def engine(self, name: str, ranks: list[EngineRank], *, head: bool | None = None) -> dict[str, Any]:
        """Trace and certify every rank of an engine."""
        twin = TWINS[name]
        stores_head = not twin["tie_word_embeddings"] if head is None else head
        source = self.source(twin, head=stores_head)
        layouts: list[Layout] = []
        certified = 0
        for rank in ranks:
            layouts.append(trace_layout(f"engine-0 {rank}", source, rank))
            certified += certify(layouts[-1], source, rank)
        return {
            "layouts": [json.loads(to_json(layout)) for layout in layouts],
            "certified": certified,
            "unused": check_engine(layouts),
            "replication": {name: [found.fewest, found.most] for name, found in replication(layouts).items()},
        }

    def family(self, name: str, sizes: list[int]) -> dict[str, Any]:
        """Trace and certify a model of another family, its checkpoint as transformers would write it."""
        twin = FAMILIES[name]()
        twin.dtype = "bfloat16"
        with torch.device("meta"):
            model = getattr(transformers, twin.architectures[0])(twin)
        # Tied tensors once; buffers only if they are saved.
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = {key: value for key, value in own.items() if key in model.state_dict()}
        saved = revert_weight_conversion(model, state)
        parameters = {key: Parameter(tuple(value.shape), "bfloat16") for key, value in saved.items()}
        source = self.source_of(twin.to_dict(), parameters)
        certified = 0
        for rank in (EngineRank(size, rank) for size in sizes for rank in range(size)):
            certified += certify(trace_layout(f"engine-0 {rank}", source, rank), source, rank)
        return {"certified": certified}

    def live(self, name: str, ranks: list[EngineRank], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        """Ranks of engines of several sizes, brought to a version together."""
        twin = TWINS[name]
        source = self.source(twin, head=not twin["tie_word_embeddings"], dtype=dtype)
        return bring_ranks(self.folder / f"store {name} {dtype} {len(ranks)}", source, ranks)

    def wider_engine(self) -> dict[str, Any]:
        """An engine that computes in float32 on a bfloat16 checkpoint."""
        twin, rank = TWINS["qwen3"], EngineRank(2, 1)
        source = self.source(twin, head=False, dtype=torch.float32)
        layout = trace_layout("engine-0 tp 1", source, rank)
        return {
            "certified": certify(layout, source, rank),
            "dtypes": sorted({t.dtype for t in layout.tensors.values()}),
        }

    def spoiled(self) -> dict[str, str]:
        """What the certificate says of a layout with two rows exchanged, and of one with a piece left out."""
        twin, rank = TWINS["qwen3"], EngineRank(2, 1)
        source = self.source(twin, head=False)
        layout = trace_layout("engine-0 tp 1", source, rank)
        at = next(i for i, piece in enumerate(layout.pieces) if piece.parameter.endswith("0.self_attn.k_proj.weight"))
        moved = dataclasses.replace(layout.pieces[at], offset=layout.pieces[at].offset + HIDDEN)
        pieces = (*layout.pieces[:at], moved, *layout.pieces[at + 1 :])
        less = layout.pieces[:at] + layout.pieces[at + 1 :]
        return {
            "moved": refusal(lambda: certify(dataclasses.replace(layout, pieces=pieces), source, rank)),
            "left out": refusal(lambda: certify(dataclasses.replace(layout, pieces=less), source, rank)),
        }

    def after_loading(self, name: str) -> dict[str, Any]:
        """What vLLM lays out anew after loading, in this process as it is."""
        twin, rank = TWINS[name], EngineRank(2, 1)
        head = not twin["tie_word_embeddings"]
        source = self.source(twin, head=head)
        layout = trace_layout("engine-0 tp 1", source, rank)
        return {"relaid": relaid(layout, source, rank), "tensors": sorted(layout.tensors)}

    def cached(self) -> dict[str, Any]:
        """Discovers twice; the second time no model may be built."""
        twin, cache = TWINS["qwen3"], LayoutCache(self.folder / "cache")
        source = self.source(twin, head=False)
        first = layout_discovery.discover_layout("engine-0 tp 0", source, EngineRank(2, 0), cache)
        with mock.patch.object(layout_discovery, "trace_layout", side_effect=AssertionError("traced again")):
            second = layout_discovery.discover_layout("engine-1 tp 0", source, EngineRank(2, 0), cache)
        return {"same": fingerprint(first) == fingerprint(second), "holder": second.holder}

    def traces_left(self) -> dict[str, Any]:
        """What tracing leaves behind in a process that may hold a live engine: groups and shared tables."""
        parallel_state._TP = alive = object()  # type: ignore[assignment]
        rotary_embedding._ROPE_DICT[("live",)] = table = object()  # type: ignore[assignment]
        twin = TWINS["llama"]
        source = self.source(twin, head=True)
        trace_layout("engine-0", source, EngineRank())
        trouble = refusal(lambda: trace_layout("engine-0", self.source_of(twin, {}), EngineRank()))
        left = {"group": parallel_state._TP is alive, "tables": {("live",): table} == rotary_embedding._ROPE_DICT}
        parallel_state._TP = None
        rotary_embedding._ROPE_DICT.clear()
        return {**left, "refused": trouble}

    def refusals(self) -> dict[str, str]:
        """What is said of checkpoints and loaders that no plan can be made for."""
        twin, parameters = TWINS["qwen3"], checkpoint(TWINS["qwen3"], head=False)
        source = self.source(twin, head=False)

        def trace(changed: dict[str, Parameter]) -> str:
            return refusal(lambda: trace_layout("engine-0 tp 0", self.source_of(twin, changed), EngineRank()))

        norm = "model.norm.weight"
        said = {
            "missing": trace({name: value for name, value in parameters.items() if name != norm}),
            "misshapen": trace(parameters | {norm: Parameter((HIDDEN + 1,), "bfloat16")}),
            "unknown": trace(parameters | {"model.layers.0.surprise": Parameter((1,), "bfloat16")}),
            "heads that do not divide": refusal(lambda: trace_layout("engine-0 tp 0", source, EngineRank(3, 0))),
        }
        for name, loader in LOADERS.items():
            ModelRegistry.register_model(loader.__name__, loader)
            odd = self.source(twin | {"architectures": [loader.__name__]}, head=False)
            said[name] = refusal(lambda odd=odd: trace_layout("engine-0 tp 0", odd, EngineRank()))
        return said

    def real_size(self) -> dict[str, Any]:
        """Qwen3-30B-A3B at TP 4, from its published sizes."""
        twin = config(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            **MOE
            | {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
            | {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
            | {"vocab_size": 151936, "intermediate_size": 6144, "tie_word_embeddings": False},
        )
        layout = trace_layout("engine-0 tp 3", self.source_of(twin, qwen3_30b_a3b()), EngineRank(4, 3))
        return {"pieces": len(layout.pieces), "elements": layout.elements}


def qwen3_30b_a3b() -> dict[str, Parameter]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, 2048), "lm_head.weight": (151936, 2048)}
    for layer in range(48):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.self_attn.{n}_proj.weight": (s, 2048) for n, s in (("q", 4096), ("k", 512), ("v", 512))}
        shapes |= {f"{block}.self_attn.o_proj.weight": (2048, 4096), f"{block}.mlp.gate.weight": (128, 2048)}
        shapes |= {f"{block}.self_attn.{n}_norm.weight": (128,) for n in "qk"}
        shapes |= {f"{block}.{n}_layernorm.weight": (2048,) for n in ("input", "post_attention")}
        for expert in range(128):
            shapes |= {f"{block}.mlp.experts.{expert}.{n}_proj.weight": (768, 2048) for n in ("gate", "up")}
            shapes[f"{block}.mlp.experts.{expert}.down_proj.weight"] = (2048, 768)
    shapes["model.norm.weight"] = (2048,)
    return {name: Parameter(shape, "bfloat16") for name, shape in shapes.items()}


def odd(name: str, load: Callable[[torch.Tensor, torch.Tensor], object]) -> type:
    """A Qwen3 whose loader treats the last norm by `load`."""

    def load_weights(self: Any, weights: Any) -> set[str]:
        held: list[torch.Tensor] = []

        def others() -> Any:
            for key, value in weights:
                if key == "model.norm.weight":
                    held.append(value)
                else:
                    yield key, value

        loaded: set[str] = Qwen3ForCausalLM.load_weights(self, others())
        load(self.model.norm.weight.data, held[0])
        return loaded

    return type(name, (Qwen3ForCausalLM,), {"load_weights": load_weights})


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except TransferError as error:
        return str(error)
    return "accepted"


LOADERS = {
    "arithmetic": odd("AddsOne", lambda norm, value: norm.copy_(value + 1)),
    "in place": odd("AddsInPlace", lambda norm, value: norm.copy_(value).add_(1)),
    "cast": odd("CastsFirst", lambda norm, value: norm.copy_(value.float())),
    "value": odd("ReadsAValue", lambda norm, value: norm.copy_(value) if value[0] > 0 else None),
    "mask": odd("Masks", lambda norm, value: norm.copy_(value[value > 0])),
    "repeat": odd("Repeats", lambda norm, value: norm.copy_(value[:1])),
    "twice": odd("WritesTwice", lambda norm, value: (norm.copy_(value), norm[:8].copy_(value[8:16]))),
    "nothing": odd("WritesNothing", lambda norm, value: None),
    "ones": odd("FillsWithOnes", lambda norm, value: (norm.fill_(1), norm.copy_(value))),
    "zeros after": odd("ZeroesAfter", lambda norm, value: (norm.copy_(value), norm[3:5].zero_())),
    "scratch": odd("CopiesAside", lambda norm, value: torch.empty_like(value).copy_(value)),
    "constant": odd("CopiesAConstant", lambda norm, value: norm.copy_(torch.ones_like(norm))),
    "zeros before": odd("ZeroesBefore", lambda norm, value: (norm.zero_(), norm.copy_(value))),
    "slices": odd("CopiesSlices", lambda norm, value: (norm[::2].copy_(value[::2]), norm[1::2].copy_(value[1::2]))),
}


def main(folder: Path) -> None:
    shop = Workshop(folder)
    tp = {size: [EngineRank(size, rank) for rank in range(size)] for size in (1, 2, 4)}
    cases: dict[str, Callable[[], Any]] = {
        f"{name} tp{size}": (lambda name=name, size=size: shop.engine(name, tp[size])) for name in TWINS for size in tp
    }
    cases |= {
        "qwen3_moe ep2": lambda: shop.engine("qwen3_moe", [EngineRank(2, r, expert_parallel=True) for r in range(2)]),
        "qwen2 pp2": lambda: shop.engine("qwen2", [EngineRank(1, 0, 2, p) for p in range(2)]),
        "llama pp2 tp2": lambda: shop.engine("llama", [EngineRank(2, t, 2, p) for p in range(2) for t in range(2)]),
        "qwen3 with a head": lambda: shop.engine("qwen3", tp[2], head=True),
        "gpt2": lambda: shop.family("gpt2", [1, 2]),
        "phi3": lambda: shop.family("phi3", [1, 2]),
        "deepseek_v3": lambda: shop.family("deepseek_v3", [1, 2]),
        # vLLM's CPU build has no experts for this one beyond a single rank.
        "gpt_oss": lambda: shop.family("gpt_oss", [1]),
        "wider engine": shop.wider_engine,
        **{f"live {name}": (lambda name=name: shop.live(name, [*tp[1], *tp[2], *tp[4]])) for name in TWINS},
        "live qwen2 float32": lambda: shop.live("qwen2", [*tp[1], *tp[2]], torch.float32),
        "live llama pp2 tp2": lambda: shop.live("llama", [EngineRank(2, t, 2, p) for p in range(2) for t in range(2)]),
        "live qwen3_moe ep2": lambda: shop.live(
            "qwen3_moe", [EngineRank(2, r, expert_parallel=True) for r in range(2)]
        ),
        "spoiled": shop.spoiled,
        "packed": lambda: shop.after_loading("qwen3"),
        "refusals": shop.refusals,
        "cached": shop.cached,
        "traces left": shop.traces_left,
        "real size": shop.real_size,
        # Last: it changes the process.
        "unpacked": lambda: (vllm_plugin._keep_weights_unpacked(), shop.after_loading("qwen3"))[1],
        "unpacked experts": lambda: shop.after_loading("qwen3_moe"),
    }
    answers: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            answers[name] = case()
        except Exception:  # noqa: BLE001 - the test that reads the answer fails with it
            answers[name] = {"error": traceback.format_exc()}
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
