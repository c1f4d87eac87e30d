"""Models of "LLMs from scratch": generating with Qwen3 and Llama 3.2, a mixture of experts beside
a plain network, and a training. Weights are what they are at first, prompts are numbers.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import torch
from figures import figure, source, stand_in

QWEN_PROMPT, LLAMA_PROMPT, BATCHED_PROMPT = 16, 20, 18
"""Tokens of the prompts that the pages name, with the words that the chat formats add."""
GPU = torch.device("cuda")


def without_tokenizers() -> None:
    class Words:
        def encode(self, text: str, **rest: Any) -> list[int]:
            return [ord(letter) % 5000 for letter in text[::4]]

        def decode(self, tokens: Any) -> str:
            return f"{len(tokens)} tokens"

    stand_in("tiktoken", get_encoding=lambda name: Words())
    stand_in("tiktoken.load", load_tiktoken_bpe=lambda path: {})


def generating(model_name: str, how: str) -> None:
    source("rasbt+LLMs-from-scratch", "pkg")
    cached = "kv_cache." if how == "cached" else "kv_cache_batched." if how == "batchcached" else ""
    family = "qwen3" if model_name.startswith("Qwen") else "llama3"
    module: Any = importlib.import_module(f"llms_from_scratch.{cached}{family}")
    plain: Any = importlib.import_module(f"llms_from_scratch.{family}")
    config = plain.QWEN_CONFIG_06_B if family == "qwen3" else plain.LLAMA32_CONFIG_1B
    config = dict(config)
    if family == "llama3":
        config["context_length"] = 8192
    model = getattr(module, model_name)(config).to(GPU)
    length = QWEN_PROMPT if family == "qwen3" else LLAMA_PROMPT
    batch = 8 if how.startswith("batch") else 1
    if batch == 8:
        length = BATCHED_PROMPT
    prompt = (torch.arange(batch * length, device=GPU) % 1000).view(batch, length)
    if cached:
        generate = importlib.import_module(f"llms_from_scratch.{cached}generate")
        generate.generate_text_simple(
            model=model, idx=prompt, max_new_tokens=150, context_size=config["context_length"]
        )
    elif batch == 8:
        importlib.import_module("llms_from_scratch.ch04").generate_text_simple(
            model=model, idx=prompt, max_new_tokens=150, context_size=config["context_length"]
        )
    else:
        importlib.import_module("llms_from_scratch.ch05").generate(
            model=model,
            idx=prompt,
            max_new_tokens=150,
            context_size=config["context_length"],
            top_k=1,
            temperature=0.0,
        )
    figure("peak", torch.cuda.max_memory_allocated())


def script(path: str, *words: str) -> None:
    """A script as its page calls it."""
    folder = source("rasbt+LLMs-from-scratch")
    sys.argv = [path, *words]
    runpy.run_path(str(folder / path), run_name="__main__")
    figure("peak", torch.cuda.max_memory_allocated())


def training() -> None:
    """One epoch; the book is a file of random letters, as long as fifty batches."""
    folder = source("rasbt+LLMs-from-scratch") / "ch05" / "10_llm-training-speed"
    work = Path(os.environ["BLIND_WORK"]) / "scratch"
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    text = "".join(chr(97 + (index * 7919) % 26) for index in range(4 * 1024 * 8 * 60))
    (work / "middlemarch.txt").write_text(text, encoding="utf-8")
    names = runpy.run_path(str(folder / "00_orig.py"), run_name="orig")
    config = {
        "vocab_size": 50257,
        "context_length": 1024,
        "emb_dim": 768,
        "n_heads": 12,
        "n_layers": 12,
        "drop_rate": 0.1,
        "qkv_bias": False,
    }
    settings = {"learning_rate": 5e-4, "num_epochs": 1, "batch_size": 8, "weight_decay": 0.1}
    printed: list[str] = []
    main: types.FunctionType = names["main"]
    main.__globals__["print"] = lambda *words, **rest: printed.append(" ".join(map(str, words)))
    main(config, settings)
    for line in "\n".join(printed).splitlines():
        for name in ("Allocated", "Reserved"):
            if line.startswith(f"{name} memory: "):
                figure(name.lower(), float(line.split()[2]) * 2**30)


if __name__ == "__main__":
    without_tokenizers()
    {"generating": generating, "script": script, "training": training}[sys.argv[1]](*sys.argv[2:])
