"""A network of convolutions."""

import torch.nn as nn
import torch.nn.functional as F

from gnn.conv import GATConv, JumpingKnowledge
from gnn.history import History


class GAT(nn.Module):
    def __init__(self, cfg, num_nodes, in_channels, out_channels):
        super().__init__()
        hidden = cfg["hidden_channels"]
        self.dropout = cfg["dropout"]
        self.convs = nn.ModuleList()
        self.norms = nn.ModuleList()
        for layer in range(cfg["num_layers"]):
            wide = hidden if layer else in_channels
            self.convs.append(GATConv(wide, hidden, heads=cfg["heads"]))
            self.norms.append(nn.LayerNorm(hidden))
        self.jk = JumpingKnowledge(cfg["jk"], hidden, cfg["num_layers"])
        self.lin = nn.Linear(self.jk.out_channels, out_channels)
        self.histories = [History(num_nodes, hidden) for _ in range(cfg["num_layers"] - 1)]

    def forward(self, x, edge_index, n_id=None):
        xs = []
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            x = F.relu(norm(conv(x, edge_index)))
            x = F.dropout(x, p=self.dropout, training=self.training)
            if n_id is not None and number < len(self.histories):
                self.histories[number].push(x.detach(), n_id)
            xs.append(x)
        return self.lin(self.jk(xs))
