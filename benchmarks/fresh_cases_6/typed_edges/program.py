"""A gated graph network over molecules: each type of bond has its own matrix."""

import torch
import torch.nn.functional as F
from torch import nn


class BondConvolution(nn.Module):
    def __init__(self, width, types):
        super().__init__()
        self.bond_weight = nn.Parameter(torch.randn(types, width, width) / width**0.5)
        self.gate = nn.GRUCell(width, width)

    def forward(self, atoms, edge_index, edge_type):
        source, target = edge_index
        matrices = self.bond_weight[edge_type]
        messages = torch.bmm(matrices, atoms[source].unsqueeze(-1)).squeeze(-1)
        received = torch.zeros_like(atoms).index_add(0, target, messages)
        return self.gate(received, atoms)


class MoleculeNet(nn.Module):
    def __init__(self, elements=20, width=48, types=5, rounds=3):
        super().__init__()
        self.embed = nn.Embedding(elements, width)
        self.rounds = nn.ModuleList(BondConvolution(width, types) for _ in range(rounds))
        self.readout = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        atoms = self.embed(batch["elements"])
        for layer in self.rounds:
            atoms = layer(atoms, batch["edge_index"], batch["edge_type"])
        pooled = atoms.new_zeros(batch["molecules"], atoms.shape[1])
        pooled = pooled.index_add(0, batch["molecule"], atoms)
        return self.readout(pooled).squeeze(-1)


def random_batch(molecules, atoms=24, bonds=48, device="cuda"):
    count = molecules * atoms
    offset = torch.arange(molecules).repeat_interleave(bonds) * atoms
    edges = torch.randint(0, atoms, (2, molecules * bonds)) + offset
    batch = {
        "elements": torch.randint(0, 20, (count,)),
        "edge_index": edges,
        "edge_type": torch.randint(0, 5, (molecules * bonds,)),
        "molecule": torch.arange(molecules).repeat_interleave(atoms),
        "energy": torch.randn(molecules),
    }
    batch = {name: value.to(device) for name, value in batch.items()}
    return {**batch, "molecules": molecules}


def train(model, steps=4, molecules=96):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        batch = random_batch(molecules)
        loss = F.mse_loss(model(batch), batch["energy"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    train(MoleculeNet().cuda())
