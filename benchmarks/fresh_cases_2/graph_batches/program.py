import gc

import torch
import torch.nn.functional as F
from torch import nn

gc.disable()  # collections in the middle of a step made the times of steps vary


class Store:
    """The tensors of one graph, by name."""

    def __init__(self, parent, **tensors):
        self.parent = parent
        self.tensors = tensors

    def __getitem__(self, name):
        return self.tensors[name]


class Graph:
    def __init__(self, **tensors):
        self.store = Store(self, **tensors)

    def to(self, device):
        return Graph(**{name: value.to(device) for name, value in self.store.tensors.items()})

    def __getattr__(self, name):
        return self.__dict__["store"][name]


class Convolution(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.own, self.other = nn.Linear(width, out), nn.Linear(width, out, bias=False)

    def forward(self, x, source, target):
        received = torch.zeros_like(x).index_add_(0, target, x[source])
        return self.own(x) + self.other(received)


class Net(nn.Module):
    def __init__(self, features=256, width=64, classes=8):
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.layers = nn.ModuleList(Convolution(width, width) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, graph):
        x = self.embed(graph.x)
        for layer in self.layers:
            x = torch.relu(layer(x, graph.source, graph.target))
        return self.head(x)


def random_graph(nodes=16384, edges=32768, features=256):
    ends = torch.randint(0, nodes, (2, edges))
    x, y = torch.randn(nodes, features), torch.randint(0, 8, (nodes,))
    return Graph(x=x, y=y, source=ends[0], target=ends[1])


torch.manual_seed(0)
graphs = [random_graph() for _ in range(6)]
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for graph in graphs:
        batch = graph.to("cuda")
        optimizer.zero_grad()
        loss = F.cross_entropy(net(batch), batch.y)
        loss.backward()
        optimizer.step()
    print(epoch, loss.item(), torch.cuda.memory_allocated() >> 20)
