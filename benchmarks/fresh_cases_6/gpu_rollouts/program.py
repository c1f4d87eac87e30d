"""Proximal policy optimization with a simulator on the GPU: rollouts never leave it."""

import torch
from torch import nn


class Swarm:
    """Many point masses that are pushed towards the origin."""

    def __init__(self, count, device):
        self.state = torch.randn(count, 64, device=device)

    def step(self, force):
        self.state = 0.98 * self.state + 0.05 * force.repeat(1, 8)
        return self.state, -self.state.square().mean(-1)


class ActorCritic(nn.Module):
    def __init__(self, observations=64, actions=8, width=64):
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, actions)
        )
        self.critic = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, 1))
        self.log_std = nn.Parameter(torch.zeros(actions))

    def act(self, observations):
        mean = self.actor(observations)
        return mean + self.log_std.exp() * torch.randn_like(mean)

    def log_prob(self, observations, actions):
        distance = (actions - self.actor(observations)) / self.log_std.exp()
        return (-0.5 * distance.square() - self.log_std).sum(-1)

    def value(self, observations):
        return self.critic(observations).squeeze(-1)


class RolloutStorage:
    def __init__(self, steps, count, device):
        self.observations = torch.empty(steps, count, 64, device=device)
        self.actions = torch.empty(steps, count, 8, device=device)
        self.log_probs = torch.empty(steps, count, device=device)
        self.rewards = torch.empty(steps, count, device=device)
        self.values = torch.empty(steps + 1, count, device=device)

    def returns(self, gamma=0.99, trace=0.95):
        advantage = torch.zeros_like(self.rewards)
        last = torch.zeros_like(self.rewards[0])
        for step in reversed(range(len(self.rewards))):
            delta = self.rewards[step] + gamma * self.values[step + 1] - self.values[step]
            last = advantage[step] = delta + gamma * trace * last
        return advantage, advantage + self.values[:-1]

    def minibatches(self, parts):
        advantage, returns = self.returns()
        flat = [self.observations, self.actions, self.log_probs, advantage, returns]
        flat = [t.flatten(0, 1) for t in flat]
        for rows in torch.randperm(flat[0].shape[0], device=flat[0].device).chunk(parts):
            yield [t[rows] for t in flat]


@torch.no_grad()
def collect(swarm, policy, storage):
    for step in range(len(storage.rewards)):
        observations = swarm.state
        actions = policy.act(observations)
        storage.observations[step] = observations
        storage.actions[step] = actions
        storage.log_probs[step] = policy.log_prob(observations, actions)
        storage.values[step] = policy.value(observations)
        _, storage.rewards[step] = swarm.step(actions)
    storage.values[-1] = policy.value(swarm.state)


def update(policy, optimizer, storage, epochs=2, parts=8, clip=0.2):
    for _ in range(epochs):
        for observations, actions, old, advantage, returns in storage.minibatches(parts):
            log_prob = policy.log_prob(observations, actions)
            ratio = (log_prob - old).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            loss = (policy.value(observations) - returns).square().mean() - surrogate.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def main(count=4096, steps=24, device="cuda"):
    torch.manual_seed(0)
    swarm, policy = Swarm(count, device), ActorCritic().to(device)
    storage = RolloutStorage(steps, count, device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    for iteration in range(3):
        collect(swarm, policy, storage)
        print(iteration, update(policy, optimizer, storage))


if __name__ == "__main__":
    main()
