"""Where a rollout is kept."""

from typing import NamedTuple

import torch


class RolloutBufferSamples(NamedTuple):
    observations: torch.Tensor
    actions: torch.Tensor
    old_values: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


class RolloutBuffer:
    def __init__(
        self,
        buffer_size,
        n_envs,
        obs_shape,
        device="cuda",
        gamma=0.99,
        gae_lambda=0.95,
        obs_dtype=torch.uint8,
        store_next_obs=False,
    ):
        self.buffer_size = buffer_size
        self.n_envs = n_envs
        self.obs_shape = obs_shape
        self.device = device
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.obs_dtype = obs_dtype
        self.store_next_obs = store_next_obs
        self.reset()

    def reset(self):
        size = (self.buffer_size, self.n_envs)
        self.observations = torch.zeros(
            (*size, *self.obs_shape), dtype=self.obs_dtype, device=self.device
        )
        if self.store_next_obs:
            self.next_observations = torch.zeros_like(self.observations)
        self.actions = torch.zeros(size, dtype=torch.long, device=self.device)
        self.rewards = torch.zeros(size, device=self.device)
        self.dones = torch.zeros(size, device=self.device)
        self.values = []
        self.log_probs = []
        self.pos = 0

    def add(self, obs, action, reward, done, value, log_prob):
        self.observations[self.pos] = obs
        self.actions[self.pos] = action
        self.rewards[self.pos] = reward.to(self.device)
        self.dones[self.pos] = done.to(self.device)
        self.values.append(value.flatten())
        self.log_probs.append(log_prob)
        self.pos += 1

    def compute_returns_and_advantage(self, last_values):
        values = torch.stack([*self.values, last_values.flatten()]).detach()
        self.advantages = torch.zeros_like(self.rewards)
        last = 0.0
        for step in reversed(range(self.buffer_size)):
            alive = 1.0 - self.dones[step]
            delta = self.rewards[step] + self.gamma * values[step + 1] * alive - values[step]
            last = delta + self.gamma * self.gae_lambda * alive * last
            self.advantages[step] = last
        self.returns = self.advantages + values[:-1]
        self.old_values = values[:-1]

    def get(self, batch_size):
        total = self.buffer_size * self.n_envs
        indices = torch.randperm(total).to(self.device)
        log_probs = torch.stack(self.log_probs).detach()
        flat = {
            "observations": self.observations.flatten(0, 1),
            "actions": self.actions.flatten(),
            "old_values": self.old_values.flatten(),
            "old_log_prob": log_probs.flatten(),
            "advantages": self.advantages.flatten(),
            "returns": self.returns.flatten(),
        }
        for start in range(0, total, batch_size):
            chosen = indices[start : start + batch_size]
            yield RolloutBufferSamples(**{name: value[chosen] for name, value in flat.items()})
