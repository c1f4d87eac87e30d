"""Relations of particles from their trajectories, by messages between nodes and edges."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--num-atoms", type=int, default=160)
parser.add_argument("--hidden", type=int, default=16)
parser.add_argument("--edge-types", type=int, default=2)
parser.add_argument("--timesteps", type=int, default=24)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()


def encode_onehot(labels):
    return np.eye(args.num_atoms, dtype=np.float32)[labels]


class MLPEncoder(nn.Module):
    def __init__(self, n_in, n_hid, n_out):
        super().__init__()
        self.mlp1 = nn.Sequential(nn.Linear(n_in, n_hid), nn.ELU(), nn.Linear(n_hid, n_hid))
        self.mlp2 = nn.Sequential(nn.Linear(2 * n_hid, n_hid), nn.ELU())
        self.mlp3 = nn.Sequential(nn.Linear(n_hid, n_hid), nn.ELU())
        self.fc_out = nn.Linear(n_hid, n_out)

    def node2edge(self, x, rel_rec, rel_send):
        return torch.cat([rel_send @ x, rel_rec @ x], dim=2)

    def edge2node(self, x, rel_rec):
        return rel_rec.t() @ x / rel_rec.size(1)

    def forward(self, inputs, rel_rec, rel_send):
        x = self.mlp1(inputs.flatten(2))
        edges = self.mlp2(self.node2edge(x, rel_rec, rel_send))
        x = self.mlp3(self.edge2node(edges, rel_rec))
        return self.fc_out(self.mlp2(self.node2edge(x, rel_rec, rel_send)))


torch.manual_seed(42)
off_diag = np.ones([args.num_atoms, args.num_atoms]) - np.eye(args.num_atoms)
receivers, senders = np.where(off_diag)
rel_rec = torch.from_numpy(encode_onehot(receivers)).cuda()
rel_send = torch.from_numpy(encode_onehot(senders)).cuda()

model = MLPEncoder(args.timesteps * 4, args.hidden, args.edge_types).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
for step in range(args.steps):
    data = torch.randn(args.batch_size, args.num_atoms, args.timesteps, 4).cuda()
    relations = torch.randint(0, args.edge_types, (args.batch_size, len(senders))).cuda()
    optimizer.zero_grad()
    logits = model(data, rel_rec, rel_send)
    loss = F.cross_entropy(logits.flatten(0, 1), relations.flatten())
    loss.backward()
    optimizer.step()
    print(step, loss.item())
