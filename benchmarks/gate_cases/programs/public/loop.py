"""A training loop that collects what steps return, as Lightning's loop did."""

import torch
import torch.nn.functional as F
from torch import nn


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 64))

    def training_step(self, batch):
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        return {"loss": loss, "scores": scores}


class Loop:
    def __init__(self, module):
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def run_batch(self, batch):
        output = self.module.training_step(batch)
        output["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return output

    def run_epoch(self, batches):
        outputs = []
        for batch in batches:
            output = self.run_batch(batch)
            outputs.append({"loss": output["loss"].item()})
        return outputs


def main():
    torch.manual_seed(0)
    loop = Loop(Module().to("cuda"))
    batches = [
        (torch.randn(256, 128, device="cuda"), torch.randint(64, (256,), device="cuda"))
        for _ in range(6)
    ]
    loop.run_epoch(batches)


if __name__ == "__main__":
    main()
