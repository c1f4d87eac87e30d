"""A model whose steps return parts of their loss for the log, as PDEArena's does."""

import torch
from torch import nn


class PDEModel:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4096)).to("cuda")
        self.criterion = nn.MSELoss()

    def training_step(self, batch):
        x, y = batch
        pred = self.model(x)
        loss = self.criterion(pred, y)
        scalar_loss = self.criterion(pred[:, :2048], y[:, :2048])
        vector_loss = self.criterion(pred[:, 2048:], y[:, 2048:])
        return {
            "loss": loss,
            "scalar_loss": scalar_loss.detach(),
            "vector_loss": vector_loss.detach(),
        }


def main():
    torch.manual_seed(0)
    module = PDEModel()
    optimizer = torch.optim.SGD(module.model.parameters(), lr=0.1)
    for _ in range(5):
        batch = torch.randn(256, 64, device="cuda"), torch.randn(256, 4096, device="cuda")
        output = module.training_step(batch)
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
    print({name: value.item() for name, value in output.items()})


if __name__ == "__main__":
    main()
