"""Multiple-choice questions for a causal language model in half precision."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class CausalLMOutput:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@dataclass
class Config:
    vocab_size: int = 32000
    hidden_size: int = 256
    layers: int = 2
    heads: int = 4


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x).relu()


class ForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids, labels=None):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        logits = self.lm_head(hidden_states)
        logits = logits.float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


@torch.inference_mode()
def answer(model, questions, options):
    answers = []
    for prompts in questions:
        logits = model(prompts.cuda()).logits
        answers += logits[:, -1, options].argmax(-1).tolist()
    return answers


if __name__ == "__main__":
    torch.manual_seed(0)
    config = Config()
    model = ForCausalLM(config).to("cuda", torch.float16).eval()
    questions = [torch.randint(0, config.vocab_size, (4, 256)) for _ in range(3)]
    print(answer(model, questions, torch.tensor([319, 350, 315, 360], device="cuda")))
