"""A model prepared for mixed precision, as accelerate's Accelerator prepares one."""

import torch
import torch.nn.functional as F
from torch import nn


class Accelerator:
    def __init__(self, device):
        self.device = device

    def prepare_model(self, model):
        model = model.to(self.device)
        model.forward = torch.autocast("cuda", dtype=torch.bfloat16)(model.forward)
        return model

    def backward(self, loss):
        loss.backward()


def convert_to_fp32(function):
    def convert(*args, **kwargs):
        return function(*args, **kwargs).float()

    return convert


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(torch.device("cuda"))
    model = accelerator.prepare_model(
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8192))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(5):
        x = torch.randn(256, 64, device="cuda")
        labels = torch.randint(8192, (256,), device="cuda")
        scores = model(x)
        loss = F.cross_entropy(scores, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
