import torch
from torch import nn

policy = nn.Sequential(
    nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 6)
).cuda()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for episode in range(3):
    log_probs, rewards = [], []
    obs = torch.randn(512, 128, device="cuda")
    for t in range(20):
        distribution = torch.distributions.Categorical(logits=policy(obs))
        action = distribution.sample()
        log_probs.append(distribution.log_prob(action))
        rewards.append(torch.rand(512, device="cuda"))
        obs = torch.randn(512, 128, device="cuda")
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    loss = -(torch.stack(log_probs) * returns).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del log_probs, rewards, distribution, loss
print(episode)
