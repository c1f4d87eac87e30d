import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Critic(nn.Module):
    def __init__(self, observations, actions, width):
        super().__init__()
        self.net = mlp([observations + actions, width, width, width, 1])

    def forward(self, observation, action):
        return self.net(torch.cat([observation, action], -1)).squeeze(-1)


class Agent(nn.Module):
    def __init__(self, observations=32, actions=8, width=2048):
        super().__init__()
        self.pi = mlp([observations, 32 * 1024, 2 * actions])
        self.q1 = Critic(observations, actions, width)
        self.q2 = Critic(observations, actions, width)

    def act(self, observation):
        mean, log_std = self.pi(observation).chunk(2, -1)
        action = mean + log_std.clamp(-5, 2).exp() * torch.randn_like(mean)
        return torch.tanh(action), -log_std.sum(-1)


agent = Agent().cuda()
target = copy.deepcopy(agent).requires_grad_(False)
q_params = itertools.chain(agent.q1.parameters(), agent.q2.parameters())
pi_optimizer = torch.optim.SGD(agent.pi.parameters(), lr=3e-4)
q_optimizer = torch.optim.SGD(q_params, lr=3e-4, foreach=False)


def q_loss(observation, action, reward, following):
    with torch.no_grad():
        after, entropy = agent.act(following)
        value = torch.min(target.q1(following, after), target.q2(following, after))
        backup = reward + 0.99 * (value + 0.2 * entropy)
    q1, q2 = agent.q1(observation, action), agent.q2(observation, action)
    return F.mse_loss(q1, backup) + F.mse_loss(q2, backup)


def pi_loss(observation):
    action, entropy = agent.act(observation)
    q = torch.min(agent.q1(observation, action), agent.q2(observation, action))
    return (-0.2 * entropy - q).mean()


def update(observation, action, reward, following):
    q_loss(observation, action, reward, following).backward()
    q_optimizer.step()
    q_optimizer.zero_grad()
    for p in q_params:
        p.requires_grad_(False)
    pi_loss(observation.repeat(4, 1)).backward()
    pi_optimizer.step()
    pi_optimizer.zero_grad()
    for p in q_params:
        p.requires_grad_(True)
    with torch.no_grad():
        for p, average in zip(agent.parameters(), target.parameters()):
            average.mul_(0.995).add_(p, alpha=0.005)
    q_optimizer.zero_grad()


n = 1024
replay = TensorDataset(torch.randn(n, 32), torch.randn(n, 8), torch.randn(n), torch.randn(n, 32))
for batch in DataLoader(replay, batch_size=128, shuffle=True):
    update(*(value.cuda() for value in batch))
print(torch.cuda.memory_allocated() >> 20)
