import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class PairPotential(nn.Module):
    """Energies of molecules from the distances of their atoms, and forces as its gradient."""

    def __init__(self, basis=32, width=256, cutoff=5.0):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.0, cutoff, basis))
        self.layers = nn.Sequential(
            nn.Linear(basis, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.energy = nn.Linear(width, 1)

    def forward(self, positions):
        positions = positions.requires_grad_()
        offset = positions[:, :, None, :] - positions[:, None, :, :]
        distance = (offset.square().sum(-1) + 1e-6).sqrt()
        basis = torch.exp(-(distance[..., None] - self.centers).square())
        energy = self.energy(self.layers(basis)).sum((1, 2, 3))
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return {"energy": energy, "forces": -gradient}


def molecules(count, atoms=20):
    positions = torch.rand(count, atoms, 3) * 5
    return TensorDataset(positions, torch.randn(count), torch.randn(count, atoms, 3))


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(self, result, energy, forces):
        return F.mse_loss(result["energy"], energy) + F.mse_loss(result["forces"], forces)

    def train_epoch(self, loader):
        self.model.train()
        for positions, energy, forces in loader:
            self.optimizer.zero_grad()
            result = self.model(positions.cuda())
            loss = self.loss(result, energy.cuda(), forces.cuda())
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def validate(self, loader):
        self.model.eval()
        total = 0.0
        for positions, energy, forces in loader:
            result = self.model(positions.cuda())
            total += self.loss(result, energy.cuda(), forces.cuda()).item()
        return total / len(loader)


trainer = Trainer(PairPotential().cuda())
train = DataLoader(molecules(96), batch_size=32, shuffle=True)
valid = DataLoader(molecules(192), batch_size=64)
for epoch in range(2):
    loss = trainer.train_epoch(train)
    print(epoch, loss, trainer.validate(valid))
