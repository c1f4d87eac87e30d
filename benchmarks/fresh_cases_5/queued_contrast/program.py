import copy

import torch
import torch.nn.functional as F
from torch import nn


class Projector(nn.Module):
    def __init__(self, inputs=1024, width=2048, out=256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class Queue:
    def __init__(self, size, width, device):
        self.keys = F.normalize(torch.randn(size, width, device=device), dim=-1)
        self.at = 0

    def push(self, keys):
        self.keys[self.at : self.at + len(keys)] = keys
        self.at = (self.at + len(keys)) % len(self.keys)


class Student:
    def __init__(self, temperature=0.07, momentum=0.99):
        self.student = Projector().cuda()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.queue = Queue(16384, 256, "cuda")
        self.temperature, self.momentum = temperature, momentum

    @torch.no_grad()
    def keys(self, x):
        for target, source in zip(self.teacher.parameters(), self.student.parameters()):
            target.lerp_(source, 1 - self.momentum)
        return self.teacher(x)

    def loss(self, x, y):
        queries, keys = self.student(x), self.keys(y)
        positive = (queries * keys).sum(-1, keepdim=True)
        negative = queries @ self.queue.keys.clone().T
        logits = torch.cat([positive, negative], 1) / self.temperature
        self.queue.push(keys)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))


def main():
    torch.manual_seed(0)
    model = Student()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.03, momentum=0.9)
    for _ in range(5):
        x = torch.randn(128, 1024, device="cuda")
        loss = model.loss(x, x + 0.1 * torch.randn_like(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(loss.item())


if __name__ == "__main__":
    main()
