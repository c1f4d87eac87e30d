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
