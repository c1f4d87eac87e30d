"""Games that show random pictures."""

import torch


class RandomVecEnv:
    def __init__(self, n_envs, shape=(4, 42, 42), n_actions=6, seed=0):
        self.n_envs = n_envs
        self.shape = shape
        self.n_actions = n_actions
        self.generator = torch.Generator().manual_seed(seed)

    def _obs(self):
        return torch.randint(
            256, (self.n_envs, *self.shape), dtype=torch.uint8, generator=self.generator
        )

    def reset(self):
        return self._obs()

    def step(self, actions):
        rewards = torch.rand(self.n_envs, generator=self.generator)
        dones = (torch.rand(self.n_envs, generator=self.generator) < 0.05).float()
        return self._obs(), rewards, dones
