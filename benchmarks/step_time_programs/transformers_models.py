"""Forward, or forward and backward passes of transformers' models, for NeuSight's rows.

Attention by matrix products ("eager"), float32, no optimizer. Each pass is a step; gradients are
released after it.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForPreTraining
from transformers import AutoModelForSequenceClassification as AutoModelForClasses

KINDS = {
    "bert": ("hidden_size", "num_hidden_layers", "num_attention_heads"),
    "gpt2": ("n_embd", "n_layer", "n_head"),
    "opt": ("hidden_size", "num_hidden_layers", "num_attention_heads"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    for name in ("width", "heads", "mlp", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--runs", required=True, help="sequence, micro-batch, layers: 512x8x24")
    parser.add_argument("--forward", action="store_true", help="only")
    parser.add_argument("--accumulation", default="1,1")
    options = parser.parse_args()
    for run in options.runs.split(","):
        sequence, batch, layers = map(int, run.split("x"))
        passes(options, sequence, batch, layers)


def passes(options: argparse.Namespace, sequence: int, batch: int, layers: int) -> None:
    width, depth, heads = KINDS[options.kind]
    sizes = {width: options.width, depth: layers, heads: options.heads}
    sizes["vocab_size"] = options.vocabulary
    if options.kind == "opt":
        sizes.update(ffn_dim=options.mlp, word_embed_proj_dim=options.width)
    if options.kind == "bert":
        sizes["intermediate_size"] = options.mlp
    if options.kind == "gpt2":
        sizes["n_positions"] = max(1024, sequence)
    config = AutoConfig.for_model(options.kind, **sizes)
    maker: type[AutoModel] = AutoModelForCausalLM
    if options.kind == "bert":
        maker = AutoModelForClasses if options.forward else AutoModelForPreTraining
    with torch.device("cuda"):
        model = maker.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.train(not options.forward)
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="cuda")
    optimizer = torch.optim.SGD([torch.zeros(1, device="cuda", requires_grad=True)], lr=0.1)
    for _ in options.accumulation.split(","):
        if options.forward:
            with torch.no_grad():
                model(ids)
        else:
            found = model(ids)
            outputs = (found.prediction_logits if options.kind == "bert" else found.logits,)
            sum(each.sum() for each in outputs).backward()
            model.zero_grad(set_to_none=True)
        optimizer.step()  # ends a step, without gradients and work


if __name__ == "__main__":
    main()
