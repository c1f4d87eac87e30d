"""A loss over a large vocabulary, computed in parts, as torchtitan does it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def part_of_loss(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


def cross_entropy_loss(hidden, weight, labels, chunks=8):
    total = hidden.new_zeros((), dtype=torch.float32)
    for part, right in zip(hidden.chunk(chunks), labels.chunk(chunks)):
        total = total + checkpoint(part_of_loss, part, weight, right, use_reentrant=False)
    return total / len(labels)


class Decoder(nn.Module):
    def __init__(self, vocabulary=8192, width=64):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layer = nn.Linear(width, width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return torch.tanh(self.layer(self.tok_embeddings(tokens)))


def main():
    torch.manual_seed(0)
    model = Decoder().to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(5):
        tokens = torch.randint(8192, (512,), device="cuda")
        hidden = model(tokens)
        loss = cross_entropy_loss(hidden, model.output.weight, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
