import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network(width, features=256, classes=50):
    return nn.Sequential(
        nn.Linear(features, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    ).cuda()


def train_step(model, optimizer, x, wanted):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), wanted)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model, loader, lr):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, foreach=False)
    for x, wanted in loader:
        loss = train_step(model, optimizer, x.cuda(), wanted.cuda())
    optimizer.zero_grad()
    return loss


@torch.no_grad()
def soft_labels(model, loader):
    return torch.cat([model(x.cuda()).softmax(1).cpu() for x, _ in loader])


@torch.no_grad()
def evaluate(model, loader):
    right = 0
    for x, y in loader:
        right += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
    return right


def report(name):
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    print(f"{name}: {allocated >> 20} MiB in tensors, {reserved >> 20} MiB in the cache")


x, y = torch.randn(2048, 256), torch.randint(0, 50, (2048,))
data = TensorDataset(x, y)
teacher = network(4096)
train(teacher, DataLoader(data, batch_size=512, shuffle=True), lr=0.01)
labels = soft_labels(teacher, DataLoader(data, batch_size=512))
report("teacher trained")
del teacher
report("teacher deleted")
student = network(512)
train(student, DataLoader(TensorDataset(x, labels), batch_size=512, shuffle=True), lr=0.05)
report("student trained")
print(evaluate(student, DataLoader(data, batch_size=512)))
