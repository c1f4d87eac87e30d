"""A training step of Llama, Qwen2 and Gemma from transformers, with liger-kernel's patches and
without, on a virtual GPU without values. Needs ``liger-kernel``, ``transformers`` and Triton.

    python benchmarks/liger_models.py [--gpu h100-80gb]

Each run is a separate process, since the patches change transformers' modules. Exits with 1 if a
step fails, or does not need less memory with the patches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

MODELS = ("llama", "qwen2", "gemma")
_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
}
_BATCH, _LENGTH = 4, 1024


def run(name: str, patched: bool, gpu: str) -> dict[str, Any]:
    """Two steps in this process: peaks in bytes, and what stays for the backward pass."""
    import torch

    import gpuprobe

    with gpuprobe.virtual_gpu(gpu, compute="shapes") as session:
        import transformers

        if patched:
            from liger_kernel import transformers as liger

            getattr(liger, f"apply_liger_kernel_to_{name}")()
        kind = {"llama": "Llama", "qwen2": "Qwen2", "gemma": "Gemma"}[name]
        config = getattr(transformers, f"{kind}Config")(**_SIZES)
        if name == "gemma":
            config.head_dim = 64
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(config.vocab_size, (_BATCH, _LENGTH), device="cuda")
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            saved = torch.cuda.memory_allocated() - before
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {
            "peak": torch.cuda.max_memory_allocated(),
            "saved": saved,
            "assumed": list(session.machine.assumed),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run(args.one[0], args.one[1] == "liger", args.gpu)))
        return
    failed = False
    print(f"{'MiB':8} {'peak':>7} {'liger':>7} {'less':>7}   {'saved':>7} {'liger':>7} {'less':>7}")
    for name in MODELS:
        rows = []
        for way in ("plain", "liger"):
            command = [sys.executable, __file__, "--gpu", args.gpu, "--one", name, way]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        cells = []
        for key in ("peak", "saved"):
            plain, patched = (row[key] / 2**20 for row in rows)
            cells.append(f"{plain:7.1f} {patched:7.1f} {plain - patched:7.1f}")
            failed |= patched >= plain
        print(f"{name:8} {'   '.join(cells)}", flush=True)
        for text in rows[1]["assumed"]:
            print(f"         assumed: {text}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
