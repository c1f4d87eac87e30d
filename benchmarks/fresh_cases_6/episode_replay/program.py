"""Agents with recurrent networks learn from whole episodes, kept in a replay buffer."""

import argparse
from collections import deque

import torch
from torch import nn
from torch.distributions import Categorical


class RecurrentAgent(nn.Module):
    def __init__(self, observations, actions, hidden):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(observations, hidden), nn.ReLU())
        self.memory = nn.GRUCell(hidden, hidden)
        self.head = nn.Linear(hidden, actions)

    def initial_state(self, agents):
        return self.head.weight.new_zeros(agents, self.memory.hidden_size)

    def forward(self, observation, state):
        state = self.memory(self.encode(observation), state)
        return self.head(state), state


class EpisodeBatch:
    """Tensors of one episode for all agents, filled step by step."""

    def __init__(self, scheme, agents, length, device):
        self.data = {
            name: torch.zeros(length, agents, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in scheme.items()
        }

    def update(self, step, **values):
        for name, value in values.items():
            self.data[name][step] = value

    def __getitem__(self, name):
        return self.data[name]


class ReplayBuffer:
    def __init__(self, capacity):
        self.episodes = deque(maxlen=capacity)

    def insert(self, episode):
        self.episodes.append(episode)

    def sample(self, count):
        picks = torch.randperm(len(self.episodes))[:count].tolist()
        return [self.episodes[pick] for pick in picks]


class Arena:
    def __init__(self, agents, observations, device):
        self.shape, self.device = (agents, observations), device

    def observe(self):
        return torch.randn(self.shape, device=self.device)

    def act(self, actions):
        return (actions % 3 == 0).float()


def run_episode(arena, agent, length, scheme):
    agents = arena.shape[0]
    episode = EpisodeBatch(scheme, agents, length, arena.device)
    state = agent.initial_state(agents)
    for step in range(length):
        observation = arena.observe()
        logits, state = agent(observation, state)
        policy = logits.softmax(-1)
        actions = Categorical(policy).sample()
        reward = arena.act(actions)
        episode.update(step, obs=observation, actions=actions, reward=reward, policy=policy)
    return episode


def learn(agent, optimizer, episodes):
    losses = []
    for episode in episodes:
        obs, actions, reward = episode["obs"], episode["actions"], episode["reward"]
        state = agent.initial_state(obs.shape[1])
        loss = 0.0
        for step in range(len(obs)):
            logits, state = agent(obs[step], state)
            log_prob = logits.log_softmax(-1).gather(-1, actions[step].unsqueeze(-1)).squeeze(-1)
            behaviour = episode["policy"][step].gather(-1, actions[step].unsqueeze(-1)).detach()
            ratio = (log_prob - behaviour.squeeze(-1).log()).exp().clamp(max=2.0)
            loss = loss - (ratio * reward[step]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--agents", type=int, default=512)
    parser.add_argument("--length", type=int, default=12)
    parser.add_argument("--episodes", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    scheme = {
        "obs": ((48,), torch.float32),
        "actions": ((), torch.long),
        "reward": ((), torch.float32),
        "policy": ((9,), torch.float32),
    }
    agent = RecurrentAgent(48, 9, 256).to(args.device)
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=5e-4)
    arena, replay = Arena(args.agents, 48, args.device), ReplayBuffer(32)
    for number in range(args.episodes):
        replay.insert(run_episode(arena, agent, args.length, scheme))
        print(number, learn(agent, optimizer, replay.sample(2)))


if __name__ == "__main__":
    main()
