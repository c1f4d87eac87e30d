import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn


class Arcade:
    """A game that shows one color frame at a time."""

    def __init__(self, size=320, length=50):
        self.size, self.length, self.time = size, length, 0

    def frame(self):
        return torch.full((3, self.size, self.size), self.time % 255, dtype=torch.uint8)

    def reset(self):
        self.time = 0
        return self.frame()

    def step(self, action):
        self.time += 1
        return self.frame(), float(action), self.time == self.length


class FrameStack:
    """Shows the last frames of a game as one state, on the GPU."""

    def __init__(self, game, count=4):
        self.game = game
        self.frames = deque(maxlen=count)

    def state(self):
        return torch.cat(tuple(self.frames))

    def reset(self):
        frame = self.game.reset().cuda()
        self.frames.extend([frame] * self.frames.maxlen)
        return self.state()

    def step(self, action):
        frame, reward, done = self.game.step(action)
        self.frames.append(frame.cuda())
        return self.state(), reward, done


class ReplayBuffer:
    def __init__(self, capacity):
        self.rows = deque(maxlen=capacity)

    def push(self, state, action, reward, following):
        self.rows.append((state, action, reward, following))

    def batches(self, size):
        rows = random.sample(list(self.rows), len(self.rows))
        for start in range(0, len(rows), size):
            states, actions, rewards, following = zip(*rows[start : start + size])
            yield torch.stack(states), actions, rewards, torch.stack(following)


def q_step(net, optimizer, states, actions, rewards, following):
    rewards = torch.tensor(rewards, device="cuda")
    with torch.no_grad():
        wanted = rewards + 0.99 * net(following.float() / 255).max(1).values
    chosen = net(states.float() / 255)[torch.arange(len(actions)), list(actions)]
    loss = F.smooth_l1_loss(chosen, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


net = nn.Sequential(
    nn.Conv2d(12, 8, 8, stride=8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 40 * 40, 4)
).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
game, replay = FrameStack(Arcade()), ReplayBuffer(capacity=10_000)
for episode in range(3):
    state, done = game.reset(), False
    while not done:
        action = random.randrange(4)
        following, reward, done = game.step(action)
        replay.push(state, action, reward, following)
        state = following
    losses = [q_step(net, optimizer, *batch) for batch in replay.batches(5)]
    print(episode, sum(losses) / len(losses), len(replay.rows))
