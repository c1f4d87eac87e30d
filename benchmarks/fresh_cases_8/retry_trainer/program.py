"""Training whose local batch size is limited when it does not fit, and tried again."""

import functools

import torch
from torch import nn


class AdaptiveLoader:
    def __init__(self, samples, batch_size, features=1024):
        self.samples, self.batch_size, self.features = samples, batch_size, features

    def __iter__(self):
        for _ in range(0, self.samples, self.batch_size):
            x = torch.randn(self.batch_size, self.features)
            yield x.cuda(), torch.randint(0, 10, (self.batch_size,)).cuda()

    def limit(self, share=0.5):
        self.batch_size = int(self.batch_size * share)


def retry(train):
    """Calls ``train`` again with smaller local batches where it runs out of memory."""

    @functools.wraps(train)
    def wrapper(model, loader, *args):
        try:
            return train(model, loader, *args)
        except torch.OutOfMemoryError:
            if loader.batch_size <= 256:
                raise
            loader.limit()
            torch.cuda.empty_cache()
            print("local batch size limited to", loader.batch_size)
            return wrapper(model, loader, *args)

    return wrapper


class Net(nn.Module):
    def __init__(self, width=2048, layers=5):
        super().__init__()
        self.inp = nn.Linear(1024, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


@retry
def train(model, loader, epochs):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.cuda.set_per_process_memory_fraction(0.03)
    train(Net().cuda(), AdaptiveLoader(32768, 16384), 1)
