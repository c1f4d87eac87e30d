"""A training step of BERT's pretraining, for NVIDIA's rows of DeepLearningExamples in the truths.

Plain torch in place of ``run_pretraining.py`` with Apex, whose level O2 this is: weights and
gradients in float16, added to float32 gradients after each micro-batch, whose loss the host waits
for; one all-reduce in float16 of all gradients after the last one. Logits are computed for all
positions. The optimizer is a fused Adam in place of a fused LAMB: a step has 128 micro-batches or
more. The biases of the GELUs are added by the matrix products, in place of their fused kernel.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bert_squad import VOCABULARY, Bert
from torch import nn

WORDS = -(-VOCABULARY // 8) * 8


class Pretraining(Bert):
    """The encoder with the heads for masked words and for the next sentence."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__(layers, width, heads)
        self.words = nn.Embedding(WORDS, width)
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(WORDS))
        self.pooler, self.next = nn.Linear(width, width), nn.Linear(width, 2)
        self.answer = nn.Identity()

    def losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of a micro-batch: the mean of the masked words' and that of the next sentences'."""
        places = torch.arange(batch["ids"].shape[1], device="cuda").unsqueeze(0)
        x = self.words(batch["ids"]) + self.positions(places.expand_as(batch["ids"]))
        x = F.dropout(self.norm(x + self.kinds(batch["kinds"])), 0.1)
        wide = (1.0 - batch["mask"].to(x.dtype)[:, None, None, :]) * -10000.0
        for layer in self.layers:
            x = layer(x, wide)
        next_sentence = self.next(torch.tanh(self.pooler(x[:, 0])))
        y = self.transform_norm(F.gelu(self.transform(x)))
        logits = F.linear(y, self.words.weight) + self.bias
        words = F.cross_entropy(logits.view(-1, WORDS), batch["words"].view(-1), ignore_index=-1)
        return words + F.cross_entropy(next_sentence, batch["next"])


def batch_of(size: tuple[int, int]) -> dict[str, torch.Tensor]:
    ids, kinds, mask, words = (torch.randint(2, size).cuda() for _ in range(4))
    return {
        "ids": ids,
        "kinds": kinds,
        "mask": mask,
        "words": words,
        "next": torch.randint(2, size[:1]).cuda(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--runs", default="128x64x24", help="sequence, micro-batch, layers")
    parser.add_argument("--accumulation", default="1,1,2")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl")
    for run in options.runs.split(","):
        sequence, batch, layers = map(int, run.split("x"))
        model = Pretraining(layers, options.width, options.heads).cuda().half()
        train(model, (batch, sequence), [int(each) for each in options.accumulation.split(",")])


def train(model: Pretraining, size: tuple[int, int], accumulation: list[int]) -> None:
    parameters = list(model.parameters())
    masters = [each.detach().float() for each in parameters]
    optimizer = torch.optim.Adam(masters, lr=6e-3, fused=True)
    wide = [torch.zeros_like(master) for master in masters]
    scale = torch.full((), 65536.0, device="cuda")
    model.train()
    for count in accumulation:
        for _ in range(count):
            loss = model.losses(batch_of(size))
            (loss * scale).backward()
            for sums, parameter in zip(wide, parameters, strict=True):
                sums.add_(parameter.grad)
                parameter.grad = None
            loss.item()
        overflow = torch.zeros((), device="cuda")
        if dist.is_initialized():
            flat = torch.cat([each.view(-1) for each in wide]).half()
            dist.all_reduce(flat)
            torch._foreach_copy_(
                wide,
                [
                    part.view_as(each)
                    for part, each in zip(
                        flat.split([each.numel() for each in wide]), wide, strict=True
                    )
                ],
            )
        torch._amp_foreach_non_finite_check_and_unscale_(wide, overflow, 1 / scale)
        if not overflow.item():
            for master, each in zip(masters, wide, strict=True):
                master.grad = each
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(parameters, masters)
        for each in wide:
            each.zero_()


if __name__ == "__main__":
    main()
