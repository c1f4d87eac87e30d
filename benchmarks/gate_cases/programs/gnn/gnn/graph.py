"""A random graph, and its parts."""

from dataclasses import dataclass

import torch


@dataclass
class Data:
    x: torch.Tensor
    y: torch.Tensor
    edge_index: torch.Tensor
    n_id: torch.Tensor

    def to(self, device):
        return Data(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def random_graph(cfg, seed=12):
    generator = torch.Generator().manual_seed(seed)
    n = cfg["num_nodes"]
    edge_index = torch.randint(n, (2, cfg["num_edges"]), generator=generator)
    if cfg["to_undirected"]:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    x = torch.rand(n, cfg["num_features"], generator=generator)
    y = torch.randint(cfg["num_classes"], (n,), generator=generator)
    return Data(x, y, edge_index, torch.arange(n))


def clusters(data, num_parts):
    """Parts of the nodes, with the edges that stay inside."""
    part = data.n_id * num_parts // len(data.n_id)
    for number in range(num_parts):
        nodes = (part == number).nonzero().flatten()
        inside = part[data.edge_index] == number
        edges = data.edge_index[:, inside[0] | inside[1]]
        # neighbours outside come along as well
        n_id = torch.cat([nodes, edges.flatten()]).unique()
        place = torch.full((len(data.n_id),), -1)
        place[n_id] = torch.arange(len(n_id))
        yield Data(data.x[n_id], data.y[n_id], place[edges], n_id)
