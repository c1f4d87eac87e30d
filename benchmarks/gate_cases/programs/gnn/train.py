"""Trains a graph network, part by part."""

import sys

import torch
import torch.nn.functional as F

from gnn.graph import clusters, random_graph
from gnn.model import GAT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

device = torch.device("cuda")


def train(model, parts, optimizer, history):
    model.train()
    total_loss = total_nodes = 0
    for batch in parts:
        batch = batch.to(device)
        optimizer.zero_grad()
        n_id = batch.n_id if history else None
        out = model(batch.x, batch.edge_index, n_id)
        loss = F.cross_entropy(out, batch.y)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(batch.y)
        total_nodes += len(batch.y)
    return total_loss / total_nodes


@torch.no_grad()
def test(model, data):
    """The share of right classes; all nodes are predicted at once."""
    model.eval()
    data = data.to(device)
    out = model(data.x, data.edge_index)
    pred = out.argmax(dim=-1)
    return int((pred == data.y).sum()) / len(data.y)


def main():
    with open("config.toml", "rb") as file:
        cfg = tomllib.load(file)
    torch.manual_seed(12345)
    data = random_graph(cfg["data"])
    parts = list(clusters(data, cfg["data"]["num_parts"]))
    model = GAT(
        cfg["model"],
        cfg["data"]["num_nodes"],
        cfg["data"]["num_features"],
        cfg["data"]["num_classes"],
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["train"]["lr"])
    for epoch in range(1, cfg["train"]["epochs"] + 1):
        loss = train(model, parts, optimizer, cfg["train"]["history"])
        if epoch % cfg["train"]["log_steps"] == 0:
            print(f"Epoch: {epoch:02d}, Loss: {loss:.4f}, Test: {test(model, data):.4f}")


if __name__ == "__main__":
    main()
