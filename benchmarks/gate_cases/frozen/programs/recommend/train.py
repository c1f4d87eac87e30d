"""Trains a click model with large tables, and evaluates it."""

import json

import torch
import torch.nn.functional as F

from recommend.clicks import Clicks
from recommend.model import ClickModel

device = torch.device("cuda")


def prefetched(batches):
    """Batches on the device, one at a time."""
    for batch in batches:
        yield [part.to(device) for part in batch]


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    losses = []
    for dense, sparse, clicked in prefetched(batches):
        logits, _ = model(dense, sparse)
        losses.append(F.binary_cross_entropy_with_logits(logits, clicked).item())
    model.train()
    return sum(losses) / len(losses)


def main():
    with open("config.json") as file:
        config = json.load(file)
    torch.manual_seed(config["seed"])
    clicks = Clicks(**config["data"])
    model = ClickModel(**config["model"]).to(device)
    tables = torch.optim.SGD(model.tables.parameters(), lr=config["lr_tables"])
    layers = torch.optim.Adagrad(model.layers(), lr=config["lr_layers"], foreach=False)
    for step, (dense, sparse, clicked) in enumerate(prefetched(clicks.batches(config["steps"]))):
        logits, features = model(dense, sparse)
        loss = F.binary_cross_entropy_with_logits(logits, clicked)
        loss.backward()
        tables.step()
        layers.step()
        tables.zero_grad(set_to_none=True)
        layers.zero_grad(set_to_none=True)
        print(f"{step}: loss {loss.item():.4f}, features {features.detach().norm().item():.1f}")
    print(f"evaluation {evaluate(model, clicks.batches(config['evaluation_steps'])):.4f}")


if __name__ == "__main__":
    main()
