import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset


class Learner(nn.Module):
    def __init__(self, features=256, width=2048, classes=5):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, classes),
        )

    def forward(self, x):
        return self.layers(x)


def adapt(model, x, y, steps, lr=0.1, second_order=True):
    parameters = dict(model.named_parameters())
    for _ in range(steps):
        loss = F.cross_entropy(functional_call(model, parameters, (x,)), y)
        gradients = torch.autograd.grad(loss, parameters.values(), create_graph=second_order)
        parameters = {
            name: parameter - lr * gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients)
        }
    return parameters


def task_step(model, support_x, support_y, query_x, query_y):
    parameters = adapt(model, support_x, support_y, steps=5)
    loss = F.cross_entropy(functional_call(model, parameters, (query_x,)), query_y)
    loss.backward()
    return loss.item()


def meta_step(model, optimizer, tasks):
    optimizer.zero_grad()
    losses = [task_step(model, *(value.cuda() for value in task)) for task in zip(*tasks)]
    optimizer.step()
    return sum(losses) / len(losses)


def evaluate(model, loader):
    right = 0
    for tasks in loader:
        for support_x, support_y, query_x, query_y in zip(*tasks):
            parameters = adapt(
                model, support_x.cuda(), support_y.cuda(), steps=5, second_order=False
            )
            with torch.no_grad():
                answer = functional_call(model, parameters, (query_x.cuda(),)).argmax(1)
            right += (answer.cpu() == query_y).sum().item()
    return right


def tasks(count, shots=25, queries=75, features=256, classes=5):
    return TensorDataset(
        torch.randn(count, shots, features),
        torch.randint(0, classes, (count, shots)),
        torch.randn(count, queries, features),
        torch.randint(0, classes, (count, queries)),
    )


model = Learner().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
for batch in DataLoader(tasks(8), batch_size=4):
    print(meta_step(model, optimizer, batch))
print(evaluate(model, DataLoader(tasks(4), batch_size=4)))
