from dataclasses import dataclass

import torch
from torch import nn


class PairPotential(nn.Module):
    """An energy of each pair of near atoms; forces are its derivative."""

    def __init__(self, width=32, basis=16, cutoff=4.0):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.0, cutoff, basis))
        self.net = nn.Sequential(
            nn.Linear(basis, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def forward(self, positions, pairs):
        offsets = positions[pairs[0]] - positions[pairs[1]]
        distance = offsets.square().sum(-1, keepdim=True).add(1e-6).sqrt()
        features = torch.exp(-(distance - self.centers).square())
        energy = self.net(features).sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=self.training)
        return energy.detach(), -gradient


@dataclass
class RelaxState:
    positions: torch.Tensor
    pairs: torch.Tensor
    forces: torch.Tensor = None
    energy: torch.Tensor = None
    s_history: torch.Tensor = None
    y_history: torch.Tensor = None
    rho_history: torch.Tensor = None
    prev_positions: torch.Tensor = None
    prev_forces: torch.Tensor = None


class Lbfgs:
    def __init__(self, model, memory=8, step=0.05):
        self.model = model
        self.memory = memory
        self.max_step = step

    def init(self, positions, pairs):
        state = RelaxState(positions.requires_grad_(True), pairs)
        state.energy, state.forces = self.model(state.positions, pairs)
        empty = positions.new_zeros(0, *positions.shape)
        state.s_history, state.y_history = empty, empty.clone()
        state.rho_history = positions.new_zeros(0)
        state.prev_positions, state.prev_forces = state.positions, state.forces
        return state

    def direction(self, state):
        q = -state.forces
        alphas = []
        for at in reversed(range(len(state.s_history))):
            s, y, rho = state.s_history[at], state.y_history[at], state.rho_history[at]
            alpha = rho * (s * q).sum()
            alphas.append(alpha)
            q = q - alpha * y
        for at, alpha in zip(range(len(state.s_history)), reversed(alphas)):
            s, y, rho = state.s_history[at], state.y_history[at], state.rho_history[at]
            q = q + s * (alpha - rho * (y * q).sum())
        return -q

    def step(self, state):
        move = self.direction(state)
        move = move * (self.max_step / (move.abs().max() + 1e-9)).clamp(max=1.0)
        new_positions = (state.positions + move.detach()).detach().requires_grad_(True)
        state.energy, new_forces = self.model(new_positions, state.pairs)
        s_new = new_positions - state.prev_positions
        y_new = -(new_forces - state.prev_forces)
        state.s_history = torch.cat([state.s_history, s_new.unsqueeze(0)])[-self.memory :]
        state.y_history = torch.cat([state.y_history, y_new.unsqueeze(0)])[-self.memory :]
        rho = 1.0 / ((s_new * y_new).sum() + 1e-9)
        state.rho_history = torch.cat([state.rho_history, rho[None]])[-self.memory :]
        state.positions, state.forces = new_positions, new_forces
        state.prev_positions, state.prev_forces = state.positions, state.forces
        return state


def random_structure(atoms=32768, neighbours=2):
    positions = torch.rand(atoms, 3, device="cuda") * 20
    pairs = torch.randint(0, atoms, (2, atoms * neighbours), device="cuda")
    return positions, pairs


def main():
    torch.manual_seed(0)
    model = PairPotential().cuda().eval()
    optimizer = Lbfgs(model)
    for structure in range(2):
        state = optimizer.init(*random_structure())
        for _ in range(90):
            state = optimizer.step(state)
        print(structure, state.energy.item(), state.forces.abs().max().item())


if __name__ == "__main__":
    main()
