import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, obs=64, hidden=1024):
        super().__init__()
        self.encoder = nn.Linear(obs, hidden)
        self.rnn = nn.GRUCell(hidden, hidden)
        self.actor = nn.Linear(hidden, 8)

    def forward(self, obs, state):
        state = self.rnn(torch.relu(self.encoder(obs)), state)
        return self.actor(state), state


class Experience:
    def __init__(self):
        self.rows = []

    def store(self, obs, action, state):
        self.rows.append((obs, action, state))


policy = Policy().cuda()
experience = Experience()
state = torch.zeros(512, 1024, device="cuda")
for t in range(24):
    obs = torch.randn(512, 64, device="cuda")
    logits, state = policy(obs, state)
    action = logits.argmax(dim=1)
    experience.store(obs, action, state)

optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for obs, action, state in experience.rows[::6]:
    logits, _ = policy(obs, state.detach())
    loss = nn.functional.cross_entropy(logits, action)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
