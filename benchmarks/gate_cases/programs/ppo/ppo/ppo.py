"""Proximal policy optimization."""

import torch
import torch.nn.functional as F

from ppo.buffers import RolloutBuffer
from ppo.policies import ActorCriticCnnPolicy


class PPO:
    def __init__(self, env, params, device="cuda"):
        self.env = env
        self.p = params
        self.device = device
        self.policy = ActorCriticCnnPolicy(env.shape, env.n_actions).to(device)
        self.optimizer = torch.optim.Adam(
            self.policy.parameters(), lr=params["learning_rate"], eps=1e-5, foreach=False
        )
        self.rollout_buffer = RolloutBuffer(
            params["n_steps"],
            params["n_envs"],
            env.shape,
            device=device,
            gamma=params["gamma"],
            gae_lambda=params["gae_lambda"],
            store_next_obs=params["store_next_obs"],
        )
        self._last_obs = env.reset().to(device)
        self.logger = {}

    def collect_rollouts(self):
        self.policy.eval()
        self.rollout_buffer.reset()
        for _ in range(self.p["n_steps"]):
            with torch.no_grad():
                actions, values, log_probs = self.policy(self._last_obs)
            new_obs, rewards, dones = self.env.step(actions.cpu())
            self.rollout_buffer.add(self._last_obs, actions, rewards, dones, values, log_probs)
            self._last_obs = new_obs.to(self.device)
        with torch.no_grad():
            _, values, _ = self.policy(self._last_obs)
        self.rollout_buffer.compute_returns_and_advantage(last_values=values)

    def train(self):
        self.policy.train()
        pg_losses, clip_fractions = [], []
        for _ in range(self.p["n_epochs"]):
            for data in self.rollout_buffer.get(self.p["batch_size"]):
                values, log_prob, entropy = self.policy.evaluate_actions(
                    data.observations, data.actions
                )
                advantages = data.advantages
                if self.p["normalize_advantage"]:
                    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                ratio = torch.exp(log_prob - data.old_log_prob)
                clip = self.p["clip_range"]
                policy_loss = -torch.min(
                    advantages * ratio, advantages * torch.clamp(ratio, 1 - clip, 1 + clip)
                ).mean()
                pg_losses.append(policy_loss.item())
                clip_fractions.append(((ratio - 1).abs() > clip).float().mean().item())
                value_loss = F.mse_loss(data.returns, values.flatten())
                entropy_loss = -entropy.mean()
                loss = (
                    policy_loss + self.p["ent_coef"] * entropy_loss + self.p["vf_coef"] * value_loss
                )
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(
                    self.policy.parameters(), self.p["max_grad_norm"], foreach=False
                )
                self.optimizer.step()
        self.logger["train/policy_loss"] = sum(pg_losses) / len(pg_losses)
        self.logger["train/clip_fraction"] = sum(clip_fractions) / len(clip_fractions)

    def learn(self, total_updates):
        for update in range(total_updates):
            self.collect_rollouts()
            self.train()
            print(update, {name: round(value, 4) for name, value in self.logger.items()})
        return self
