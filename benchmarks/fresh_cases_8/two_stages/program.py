"""An agent in two stages: a representation first, then a policy on top of it."""

import torch
import torch.nn.functional as F
from torch import nn


class Algorithm:
    """Networks with one optimizer, whose parameters depend on the stage."""

    def __init__(self, encoder, decoder, policy):
        self.encoder, self.decoder, self.policy = encoder, decoder, policy
        self.optimizer = torch.optim.Adam(
            [*encoder.parameters(), *decoder.parameters()], lr=3e-4, foreach=False
        )
        self.stage = "representation"

    def begin_policy_stage(self):
        self.optimizer.zero_grad()
        self.encoder.requires_grad_(False)
        self.decoder = None
        self.optimizer.param_groups.clear()
        self.optimizer.add_param_group({"params": list(self.policy.parameters())})
        self.stage = "policy"

    def loss(self, experience):
        if self.stage == "representation":
            code = self.encoder(experience["observation"])
            return F.mse_loss(self.decoder(code), experience["observation"])
        code = self.encoder(experience["observation"])
        advantage = experience["reward"] - experience["reward"].mean()
        return (
            F.cross_entropy(self.policy(code), experience["action"], reduction="none") * advantage
        ).mean()

    def train_iter(self, experience):
        loss = self.loss(experience)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def rollout(size, observation=512, actions=16):
    return {
        "observation": torch.randn(size, observation).cuda(),
        "action": torch.randint(0, actions, (size,)).cuda(),
        "reward": torch.randn(size).cuda(),
    }


def build(width=2048):
    encoder = nn.Sequential(
        nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 256)
    )
    decoder = nn.Sequential(nn.Linear(256, 512))
    policy = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 16))
    return Algorithm(encoder.cuda(), decoder.cuda(), policy.cuda())


if __name__ == "__main__":
    torch.manual_seed(0)
    algorithm = build()
    for _ in range(3):
        print(algorithm.stage, algorithm.train_iter(rollout(64)))
    algorithm.begin_policy_stage()
    for _ in range(3):
        print(algorithm.stage, algorithm.train_iter(rollout(5120)))
