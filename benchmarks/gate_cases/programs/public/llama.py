"""A causal language model with its loss inside, as transformers' models have it."""

import torch
import torch.nn.functional as F
from torch import nn


class Llama(nn.Module):
    def __init__(self, vocabulary=4096, width=128):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, labels=None):
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = hidden_states + F.silu(layer(hidden_states))
        logits = self.lm_head(hidden_states)

        loss = None
        if labels is not None:
            shift_logits = logits[..., :-1, :]
            shift_labels = labels[..., 1:]
            loss = F.cross_entropy(shift_logits.flatten(0, 1), shift_labels.flatten())
        return loss, logits


def main():
    torch.manual_seed(0)
    model = Llama().to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(5):
        input_ids = torch.randint(4096, (4, 64), device="cuda")
        loss, _ = model(input_ids, labels=input_ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
