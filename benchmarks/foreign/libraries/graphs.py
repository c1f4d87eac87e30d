"""Graphs and symmetries: PyTorch Geometric, e3nn, escnn."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


def _graph(seed: int = 0, nodes: int = 20) -> Any:
    import torch
    from torch_geometric.data import Data

    draw = torch.Generator().manual_seed(seed)
    return Data(
        x=torch.randn(nodes, 8, generator=draw),
        edge_index=torch.randint(0, nodes, (2, 4 * nodes), generator=draw),
        y=torch.randint(0, 3, (nodes,), generator=draw),
        train_mask=torch.rand(nodes, generator=draw) > 0.3,
    )


@program("pyg/gcn-node-classification", "torch_geometric.nn", "torch_geometric.data")
def gcn(device: str) -> Any:
    import torch
    import torch.nn.functional as F
    from torch_geometric.nn import GCNConv

    class GCN(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = GCNConv(8, 16), GCNConv(16, 3)

        def forward(self, data: Any) -> Any:
            x = F.relu(self.one(data.x, data.edge_index))
            return F.log_softmax(self.two(x, data.edge_index), dim=1)

    data, model = _graph().to(device), GCN().to(device)

    def loss() -> Any:
        return F.nll_loss(model(data)[data.train_mask], data.y[data.train_mask])

    found = steps_of(model, loss)
    right = (model(data).argmax(1)[~data.train_mask] == data.y[~data.train_mask]).sum()
    return [*found, int(right)]


@program("pyg/gat-and-sage", "torch_geometric.nn", "torch_geometric.data")
def gat(device: str) -> Any:
    import torch
    import torch.nn.functional as F
    from torch_geometric.nn import GATv2Conv, SAGEConv

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = GATv2Conv(8, 8, heads=2), SAGEConv(16, 3)

        def forward(self, x: Any, edges: Any) -> Any:
            return self.two(F.elu(self.one(x, edges)), edges)

    data, model = _graph().to(device), Net().to(device)
    return steps_of(model, lambda: F.cross_entropy(model(data.x, data.edge_index), data.y))


@program("pyg/gin-batches-of-graphs", "torch_geometric.nn", "torch_geometric.loader")
def gin(device: str) -> Any:
    import torch
    import torch.nn.functional as F
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GINConv, global_add_pool

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
            self.conv, self.out = GINConv(layers), torch.nn.Linear(16, 2)

        def forward(self, data: Any) -> Any:
            return self.out(global_add_pool(self.conv(data.x, data.edge_index), data.batch))

    graphs = [_graph(i, nodes=6 + i) for i in range(6)]
    for i, graph in enumerate(graphs):
        graph.label = i % 2
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for batch in DataLoader(graphs, batch_size=3, shuffle=True):
        batch = batch.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), batch.label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@program("pyg/link-prediction", "torch_geometric.nn", "torch_geometric.utils")
def links(device: str) -> Any:
    import torch
    import torch.nn.functional as F
    from torch_geometric.nn import GAE, GCNConv
    from torch_geometric.utils import add_self_loops, coalesce, to_undirected

    data = _graph().to(device)
    edges = coalesce(to_undirected(data.edge_index))
    edges, _ = add_self_loops(edges, num_nodes=data.num_nodes)
    model = GAE(GCNConv(8, 16)).to(device)
    wrong = torch.randint(0, 20, (2, 40)).to(device)

    def loss() -> Any:
        z = model.encode(data.x, edges)
        score = torch.cat(
            [model.decode(z, edges, sigmoid=False), model.decode(z, wrong, sigmoid=False)]
        )
        aim = torch.cat([torch.ones(edges.size(1)), torch.zeros(40)]).to(device)
        return F.binary_cross_entropy_with_logits(score, aim)

    return steps_of(model, loss)


@program("pyg/pooling-and-transformer", "torch_geometric.nn", "torch_geometric.data")
def pooling(device: str) -> Any:
    import torch
    from torch_geometric.nn import TopKPooling, TransformerConv, global_mean_pool

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = TransformerConv(8, 16), TopKPooling(16, ratio=0.5)
            self.out = torch.nn.Linear(16, 1)

        def forward(self, data: Any) -> Any:
            x = self.conv(data.x, data.edge_index).relu()
            x, _, _, batch, _, _ = self.pool(x, data.edge_index)
            return self.out(global_mean_pool(x, batch))

    data, model = _graph().to(device), Net().to(device)
    return steps_of(model, lambda: (model(data) - 1).square().mean())


@program("e3nn/tensor-products", "e3nn.o3", "e3nn.nn")
def e3nn(device: str) -> Any:
    import torch
    from e3nn import o3
    from e3nn.nn import FullyConnectedNet, Gate

    torch.manual_seed(0)
    given, harmonics = o3.Irreps("4x0e+2x1o"), o3.Irreps.spherical_harmonics(2)
    gate = Gate("8x0e", [torch.relu], "4x0e", [torch.sigmoid], "4x1o")
    product = o3.FullyConnectedTensorProduct(given, harmonics, gate.irreps_in, shared_weights=False)
    radial = FullyConnectedNet([4, 16, product.weight_numel], torch.relu)
    model = torch.nn.ModuleList([gate, product, radial]).to(device)
    x = given.randn(12, -1).to(device)
    positions = torch.randn(12, 3).to(device)
    lengths = torch.rand(12, 4).to(device)

    def loss() -> Any:
        directions = o3.spherical_harmonics(harmonics, positions, True, normalization="component")
        return gate(product(x, directions, radial(lengths))).square().mean()

    return steps_of(model, loss)


@program("escnn/steerable-convolution", "escnn.nn", "escnn.gspaces")
def escnn(device: str) -> Any:
    import torch
    from escnn import gspaces
    from escnn import nn as enn

    space = gspaces.rot2dOnR2(N=4)
    colours = enn.FieldType(space, 3 * [space.trivial_repr])
    hidden = enn.FieldType(space, 4 * [space.regular_repr])
    model = enn.SequentialModule(
        enn.R2Conv(colours, hidden, 5, padding=2),
        enn.InnerBatchNorm(hidden),
        enn.ReLU(hidden),
        enn.PointwiseAvgPool(hidden, 4),
        enn.GroupPooling(hidden),
    ).to(device)
    images = torch.randn(2, 3, 16, 16).to(device)
    return steps_of(model, lambda: model(colours(images)).tensor.square().mean())
