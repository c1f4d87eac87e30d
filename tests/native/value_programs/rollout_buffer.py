"""Actions are chosen on the device; the update's batch is the buffer's size."""

import sys

import torch

device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
torch.manual_seed(0)
policy = torch.nn.Sequential(
    torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 2)
).to(device)
optimizer = torch.optim.Adam(policy.parameters())
for update in range(3):
    state, kept = torch.ones(8) * (update + 1), []
    for _ in range(25):
        action = int(policy(state.to(device)).argmax())
        reward = 1.0 if action == len(kept) % 2 else -1.0
        kept.append((state, action, reward))
        state = state * (0.9 if action else 1.05)
        if reward < 0 and len(kept) > 3:
            break
    states = torch.stack([s for s, _, _ in kept]).to(device)
    actions = torch.tensor([a for _, a, _ in kept]).to(device)
    rewards = torch.tensor([r for _, _, r in kept]).to(device)
    log = torch.log_softmax(policy(states), -1).gather(1, actions[:, None])[:, 0]
    (-(log * rewards).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("batch", len(kept))
