"""Finetunes the last layers of an encoder."""

import torch
import torch.nn.functional as F
import yaml

from finetune.encoder import Encoder
from finetune.reviews import reviews


def train(model, optimizer, batches):
    model.train()
    for step, (words, labels) in enumerate(batches):
        loss = F.cross_entropy(model(words.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step}: loss {loss.item():.4f}")


def main():
    with open("settings.yaml") as file:
        settings = yaml.safe_load(file)
    torch.manual_seed(settings["seed"])
    model = Encoder(**settings["model"]).cuda()
    model.freeze(settings["frozen"])
    model.gradient_checkpointing(**settings["checkpoint"])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings["lr"], foreach=False)
    classes = settings["model"]["classes"]
    train(model, optimizer, reviews(**settings["data"], classes=classes, count=settings["steps"]))


if __name__ == "__main__":
    main()
