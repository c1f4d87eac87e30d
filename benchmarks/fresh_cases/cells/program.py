import code
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Shell(code.InteractiveInterpreter):
    """Runs cells one after the other, as a notebook does: a failed one does not end the others."""

    def __init__(self):
        super().__init__(globals())
        self.failed = 0

    def run_cell(self, source):
        self.runsource(source, "<cell>", "exec")

    def showtraceback(self):
        self.failed += 1
        print("cell failed:", sys.exc_info()[1])
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()


class Encoder(nn.Module):
    def __init__(self, width=1024, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


@torch.no_grad()
def compare_layers(model, x, reference):
    outputs = [x]
    for layer in model.layers:
        outputs.append(torch.relu(layer(outputs[-1])))
    distances = []
    for output, expected in zip(outputs, reference):
        distances.append((output - expected).norm().item())
    return distances


def train(model, data, lr=0.01):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in DataLoader(data, batch_size=4096, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model, data):
    right = 0
    for x, y in DataLoader(data, batch_size=2048):
        right += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
    return right


data = TensorDataset(torch.randn(8192, 1024), torch.randint(0, 10, (8192,)))
model = Encoder().cuda()
shell = Shell()
shell.run_cell("print(evaluate(model, data))")
shell.run_cell("compare_layers(model, torch.randn(8192, 1024).cuda(), torch.zeros(5, 3).cuda())")
shell.run_cell("print(train(model, data))")
shell.run_cell("print(evaluate(model, data))")
print(shell.failed, "failed,", torch.cuda.memory_allocated() >> 20)
