import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, features=512, width=2048, depth=5, classes=20):
        super().__init__()
        sizes = [features] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = torch.zeros((), device="cuda")
    for x, y in loader:
        right += (model.module(x.cuda()).argmax(1) == y.cuda()).sum()
    dist.all_reduce(right)
    model.train()
    return right.item()


def loader_of(data, batch_size, shuffle):
    sampler = DistributedSampler(data, shuffle=shuffle)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def main():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    model = DistributedDataParallel(
        Classifier().cuda(), device_ids=[0], gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    data = TensorDataset(torch.randn(4096, 512), torch.randint(0, 20, (4096,)))
    train, valid = torch.utils.data.random_split(data, [3072, 1024])
    train_loader = loader_of(train, 1024, shuffle=True)
    for epoch in range(2):
        train_loader.sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = train_step(model, optimizer, x.cuda(), y.cuda())
        print(epoch, loss, evaluate(model, loader_of(valid, 1024, shuffle=False)))
    dist.destroy_process_group()


main()
