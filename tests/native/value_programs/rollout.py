"""An episode ends where the state leaves the track."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
policy = torch.nn.Sequential(
    torch.nn.Linear(4, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1)
).to(device)
lengths = []
for episode in range(3):
    state, steps = torch.zeros(4) + 0.05 * episode, 0
    with torch.no_grad():
        while steps < 60:
            force = policy(state.to(device)).tanh().item()
            state = state + torch.tensor([state[1].item(), force * 0.3, 0.01, 0.02])
            steps += 1
            if abs(state[0].item()) > 0.5:
                break
    lengths.append(steps)
print("lengths", lengths)
