"""Log-probabilities of chosen tokens, as TRL's trainers need them."""

import torch
from torch import nn


def selective_log_softmax(logits, index):
    chosen = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    norms = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    return chosen - norms


class Trainer:
    def __init__(self, model, reference):
        self.model = model
        self.reference = reference

    def logps(self, model, tokens):
        logits = model(tokens)
        logits = logits[:, :-1]
        index = tokens[:, 1:]
        return selective_log_softmax(logits, index)

    def loss(self, tokens):
        with torch.inference_mode():
            reference = self.logps(self.reference, tokens)
        chosen = self.logps(self.model, tokens)
        return -(chosen - reference.clone()).mean()


def policy():
    return nn.Sequential(nn.Embedding(4096, 64), nn.Linear(64, 4096)).to("cuda")


def main():
    torch.manual_seed(0)
    trainer = Trainer(policy(), policy())
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1e-2)
    for _ in range(5):
        tokens = torch.randint(4096, (8, 48), device="cuda")
        loss = trainer.loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
