"""Generating with Qwen2.5-1.5B-Instruct in one cache mode after another, by the benchmark of
"KV-cache Consumer GPU Benchmark". The model has its published configurations, also that of
generation (whose repetition penalty applies), but no weights. Without values, what the program
reads from the GPU is given here: no token is padding, and none ends a text.
"""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import torch
from figures import figure, source

CONFIG = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
GENERATION = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "pad_token_id": 151643,
    "repetition_penalty": 1.1,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
}


class Words:
    """What the benchmark reads from a tokenizer."""

    bos_token_id = None
    eos_token_id = 151645
    pad_token_id = 151643

    def __len__(self) -> int:
        return 151665


def model_of(transformers: Any) -> Any:
    for name in ("normal_", "uniform_", "trunc_normal_", "zeros_", "ones_", "constant_"):
        setattr(torch.nn.init, name, lambda tensor, *rest, **named: tensor)
    config = transformers.Qwen2Config(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    return model.to("cuda")


def without_values(transformers: Any) -> None:
    """No padding; and a text ends at its greatest length alone."""
    masks: Any = importlib.import_module("transformers.masking_utils")
    ignore = masks._ignore_causal_mask_sdpa

    def ignored(padding_mask: torch.Tensor | None, *rest: Any, **named: Any) -> bool:
        if padding_mask is not None:
            padding_mask.all()
        return bool(ignore(None, *rest, **named))

    masks._ignore_causal_mask_sdpa = ignored
    generating = transformers.GenerationMixin
    generate = generating.generate
    left = [0]

    def counted(self: Any, *rest: Any, **named: Any) -> Any:
        left[0] = named["max_new_tokens"]
        return generate(self, *rest, **named)

    def unfinished(self: Any, *rest: Any, **named: Any) -> bool:
        left[0] -= 1
        return left[0] >= 0

    generating.generate = counted
    generating._has_unfinished_sequences = unfinished


def main(modes: str, batches: str, lengths: str) -> None:
    source("oyeong011+kv-cache-consumer-gpu-bench", ".")
    transformers: Any = importlib.import_module("transformers")
    bench: Any = importlib.import_module("run_kv_cache_bench")
    model = model_of(transformers)
    without_values(transformers)
    model.eval()
    device = torch.device("cuda")
    for mode in modes.split(","):
        for batch in map(int, batches.split(",")):
            for length in map(int, lengths.split(",")):
                row = bench.bench_one(
                    model=model,
                    tokenizer=Words(),
                    model_id="Qwen/Qwen2.5-1.5B-Instruct",
                    dtype_name="fp16",
                    cache_mode=mode,
                    batch_size=batch,
                    seq_len=length,
                    max_new_tokens=64,
                    shape=bench.infer_model_shape(model.config),
                    device=device,
                    warmup=True,
                    quantized_nbits=4,
                    quantized_backend="quanto",
                    telemetry_interval_s=0,
                    continue_after_prefill_oom=False,
                )
                key = f"{mode} b{batch} s{length}"
                if row["status"] == "error":
                    print(key, row["error"], file=sys.stderr)
                    continue
                figure(f"{key} verdict", "OOM" if row["status"] == "oom" else "fits")
                if row["status"] == "ok" and not math.isnan(row["peak_allocated_bytes"]):
                    figure(f"{key} base", row["base_allocated_bytes"])
                    figure(f"{key} peak", row["peak_allocated_bytes"])
                    figure(f"{key} reserved", row["peak_reserved_bytes"])


if __name__ == "__main__":
    main(*sys.argv[1:])
