"""Hard examples of a loader with workers are kept for a second pass."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"


def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 1024), torch.arange(128))
    model = torch.nn.Linear(1024, 1024).to(device)
    hard = []
    for x, numbers in DataLoader(data, 32, num_workers=2):
        each = model(x.to(device)).square().mean(1)
        hard += [n for n, e in zip(numbers.tolist(), each.tolist()) if e > 0.34]
    again = DataLoader(torch.utils.data.Subset(data, hard), 16) if hard else []
    print("hard", len(hard), "batches", len(again))


if __name__ == "__main__":
    main()
