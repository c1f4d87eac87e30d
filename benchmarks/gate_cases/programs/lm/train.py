"""Train the language model on random texts."""

import torch
import torch.nn.functional as F

from config import STEPS, Config
from data import draw
from evaluate import perplexity
from model import Model


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model, batches, optimizer, device):
    total = torch.zeros((), device=device)
    for tokens in batches:
        tokens = tokens.to(device)
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return total.item() / len(batches)


def main():
    torch.manual_seed(0)
    config = Config()
    device = torch.device("cuda")
    model = Model(config).to(device, torch.bfloat16)
    optimizer = make_optimizer(model)
    texts = draw(config.vocabulary, STEPS, seed=1)
    held_back = draw(config.vocabulary, 2, seed=2)
    loss = train(model, texts, optimizer, device)
    print(f"loss {loss:.2f}, perplexity {perplexity(model, held_back, device):.1f}")


if __name__ == "__main__":
    main()
