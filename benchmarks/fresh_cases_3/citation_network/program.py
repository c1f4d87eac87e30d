from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Data:
    x: torch.Tensor
    edge_index: torch.Tensor
    y: torch.Tensor
    train_mask: torch.Tensor

    def to(self, device):
        return Data(*(value.to(device) for value in vars(self).values()))


def gcn_norm(edge_index, nodes):
    """Edges with self-loops, and the symmetric normalization of each."""
    loops = torch.arange(nodes, device=edge_index.device).repeat(2, 1)
    edge_index = torch.cat([edge_index, loops], dim=1)
    degree = torch.zeros(nodes, device=edge_index.device)
    degree.scatter_add_(0, edge_index[1], torch.ones(edge_index.shape[1], device=degree.device))
    scale = degree.pow(-0.5)
    return edge_index, scale[edge_index[0]] * scale[edge_index[1]]


class MessagePassing(nn.Module):
    def propagate(self, edge_index, x, weight):
        source, target = edge_index
        messages = self.message(x[source], weight)
        return self.aggregate(messages, target, len(x))

    def message(self, x_j, weight):
        return x_j

    def aggregate(self, messages, target, nodes):
        out = messages.new_zeros(nodes, messages.shape[1])
        return out.index_add_(0, target, messages)


class GCNConv(MessagePassing):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin = nn.Linear(inputs, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x, edge_index, weight):
        return self.propagate(edge_index, self.lin(x), weight) + self.bias

    def message(self, x_j, weight):
        return weight.view(-1, 1) * x_j


class GCN(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.conv1 = GCNConv(features, hidden)
        self.conv2 = GCNConv(hidden, hidden)
        self.conv3 = GCNConv(hidden, classes)

    def forward(self, x, edge_index, weight):
        x = F.relu(self.conv1(x, edge_index, weight))
        x = F.dropout(x, 0.5, self.training)
        x = F.relu(self.conv2(x, edge_index, weight))
        return self.conv3(x, edge_index, weight)


def random_citations(nodes=8192, edges=196608, features=128, classes=16):
    return Data(
        x=torch.randn(nodes, features),
        edge_index=torch.randint(0, nodes, (2, edges)),
        y=torch.randint(0, classes, (nodes,)),
        train_mask=torch.rand(nodes) < 0.5,
    )


def train_epoch(model, optimizer, data, edge_index, weight):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, edge_index, weight)
    loss = F.cross_entropy(out, data.y, reduction="none")
    loss = (loss * data.train_mask).sum() / data.train_mask.sum()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model, data, edge_index, weight):
    model.eval()
    right = model(data.x, edge_index, weight).argmax(-1) == data.y
    return (right & ~data.train_mask).sum().item() / (~data.train_mask).sum().item()


def main():
    torch.manual_seed(0)
    data = random_citations().to("cuda")
    edge_index, weight = gcn_norm(data.edge_index, len(data.x))
    model = GCN(128, 128, 16).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(4):
        loss = train_epoch(model, optimizer, data, edge_index, weight)
        print(epoch, loss, accuracy(model, data, edge_index, weight))


if __name__ == "__main__":
    main()
