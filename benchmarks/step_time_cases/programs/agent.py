"""A small Q-network with a slowly following target, as in reinforcement learning."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

STATE, ACTIONS, WIDTH, DEPTH, BATCH = 64, 8, 256, 6, 128


def network():
    layers, size = [], STATE
    for _ in range(DEPTH):
        layers += [nn.Linear(size, WIDTH), nn.ReLU()]
        size = WIDTH
    return nn.Sequential(*layers, nn.Linear(size, ACTIONS))


class Replay:
    def __init__(self, size=4096):
        self.state = torch.zeros(size, STATE, device="cuda")
        self.following = torch.zeros(size, STATE, device="cuda")
        self.action = torch.zeros(size, dtype=torch.int64, device="cuda")
        self.reward = torch.zeros(size, device="cuda")

    def sample(self):
        at = torch.randint(0, len(self.reward), (BATCH,), device="cuda")
        return self.state[at], self.following[at], self.action[at], self.reward[at]


def normalized(states):
    return (states - states.mean(dim=1, keepdim=True)) / (states.std(dim=1, keepdim=True) + 1e-5)


def main():
    online = network().cuda()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3, fused=True)
    parameters = list(online.parameters())
    followers = list(target.parameters())
    replay = Replay()
    for _ in range(6):
        state, following, action, reward = replay.sample()
        state, following = normalized(state), normalized(following)
        with torch.no_grad():
            best = target(following).max(dim=1).values
            goal = reward + 0.99 * best
        value = online(state).gather(1, action[:, None])[:, 0]
        loss = F.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 10.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(followers, parameters, 0.005)


if __name__ == "__main__":
    main()
