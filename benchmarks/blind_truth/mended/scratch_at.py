"""``scratch.py`` with the package as it was when the figure was published, and models that need
more memory than the host has built on the GPU, in the type that they are converted to.

    scratch_at.py COMMIT generating|ffn|training ...
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

import figures
import scratch
import torch

NAME = "rasbt+LLMs-from-scratch"
BUILD = "model = GPTModel(GPT_CONFIG_124M)"


def source_at(commit: str, name: str, *paths: str) -> Path:
    folder = Path(os.environ["BLIND_SOURCES"]) / name
    other = folder.with_name(f"{name}@{commit}")
    if not other.exists():
        words = ["git", "-C", str(folder), "worktree", "add", "-q", "--detach", str(other), commit]
        subprocess.run(words, check=True)
    return figures.source(other.name, *paths)


def generating(model_name: str, how: str) -> None:
    """Llama's context is the configuration's own, which its positions take memory for."""
    if model_name.startswith("Llama3"):
        scratch.source(NAME, "pkg")
        cached = "kv_cache." if how == "cached" else ""
        module = importlib.import_module(f"llms_from_scratch.{cached}llama3")
        plain = getattr(module, model_name)
        setattr(module, model_name, lambda config: plain({**config, "context_length": 131072}))
    scratch.generating(model_name, how)


def script(path: str, *words: str) -> None:
    """A script whose model is built on the GPU."""
    text = (figures.source(NAME) / path).read_text(encoding="utf-8")
    lines = [
        "torch.set_default_dtype(torch.bfloat16)",
        f"with torch.device('cuda'): {BUILD}",
        "torch.set_default_dtype(torch.float32)",
    ]
    copy = Path(os.environ["BLIND_WORK"]) / Path(path).name
    text = text.replace(BUILD, "\n    ".join(lines))
    text = text.replace(
        "token_ids.squeeze(0).tolist()", "[]"
    )  # text, whose letters are not computed
    text = text.replace('print("\\nOutput:", token_ids)', "")
    copy.write_text(text, encoding="utf-8")
    sys.argv = [path, *words]
    code = compile(copy.read_text(encoding="utf-8"), str(copy), "exec")
    exec(code, {"__name__": "__main__", "__file__": str(copy)})
    scratch.figure("peak", torch.cuda.max_memory_allocated())


def training() -> None:
    """The sample that is printed is text, whose letters are not computed."""
    plain = scratch.runpy.run_path  # type: ignore[attr-defined]

    def run_path(path: str, run_name: str) -> dict[str, object]:
        names: dict[str, object] = plain(path, run_name=run_name)
        names["main"].__globals__["token_ids_to_text"] = lambda *words: ""  # type: ignore[attr-defined]
        return names

    scratch.runpy.run_path = run_path  # type: ignore[attr-defined]
    scratch.training()


if __name__ == "__main__":
    commit, what, *rest = sys.argv[1:]
    if commit != "now":
        scratch.source = functools.partial(source_at, commit)  # type: ignore[assignment]
    scratch.without_tokenizers()
    {"generating": generating, "script": script, "training": training}[what](*rest)
