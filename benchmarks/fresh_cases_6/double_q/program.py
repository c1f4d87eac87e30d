"""Double Q-learning from frames; the target network is a frozen-in-time copy."""

import copy
import random
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn

Transition = namedtuple("Transition", "state action reward next_state done")


class Replay:
    def __init__(self, capacity):
        self.capacity, self.rows, self.at = capacity, [], 0

    def push(self, *row):
        if len(self.rows) < self.capacity:
            self.rows.append(None)
        self.rows[self.at] = Transition(*row)
        self.at = (self.at + 1) % self.capacity

    def sample(self, size, device):
        rows = Transition(*zip(*random.sample(self.rows, size)))
        frames = [
            torch.stack(part).to(device).float() / 255 for part in (rows.state, rows.next_state)
        ]
        action = torch.tensor(rows.action, device=device)
        reward = torch.tensor(rows.reward, device=device)
        done = torch.tensor(rows.done, device=device, dtype=torch.float32)
        return Transition(frames[0], action, reward, frames[1], done)


class DuelingNet(nn.Module):
    def __init__(self, channels, actions):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.advantage = nn.Linear(64 * 7 * 7, actions)
        self.value = nn.Linear(64 * 7 * 7, 1)

    def forward(self, frames):
        features = self.features(frames)
        advantage = self.advantage(features)
        return self.value(features) + advantage - advantage.mean(1, keepdim=True)


class Learner:
    def __init__(self, actions, gamma=0.99, device="cuda"):
        self.gamma, self.device = gamma, device
        self.online = DuelingNet(4, actions).to(device)
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=1e-4)

    def bootstrapped(self, batch):
        best = self.online(batch.next_state).argmax(1, keepdim=True)
        following = self.target(batch.next_state).gather(1, best).squeeze(1)
        return batch.reward + self.gamma * following * (1 - batch.done)

    def update(self, batch):
        returns = self.bootstrapped(batch)
        chosen = self.online(batch.state).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(chosen, returns.detach())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        return loss.item()

    def synchronize(self):
        self.target.load_state_dict(self.online.state_dict())


def frame():
    return torch.randint(0, 256, (4, 84, 84), dtype=torch.uint8)


def main(steps=6, warmup=300, batch=256):
    torch.manual_seed(0)
    random.seed(0)
    replay, learner = Replay(1000), Learner(actions=6)
    state = frame()
    for _ in range(warmup):
        following = frame()
        replay.push(state, random.randrange(6), random.random(), following, random.random() < 0.05)
        state = following
    for step in range(steps):
        loss = learner.update(replay.sample(batch, learner.device))
        if step % 3 == 2:
            learner.synchronize()
        print(step, loss)


if __name__ == "__main__":
    main()
