"""The network that acts and values."""

import torch
import torch.nn as nn
from torch.distributions import Categorical


class ActorCriticCnnPolicy(nn.Module):
    def __init__(self, obs_shape, n_actions, features_dim=256):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(obs_shape[0], 32, kernel_size=5, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3, stride=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            n_flatten = self.cnn(torch.zeros(1, *obs_shape)).shape[1]
        self.linear = nn.Sequential(nn.Linear(n_flatten, features_dim), nn.ReLU())
        self.action_net = nn.Linear(features_dim, n_actions)
        self.value_net = nn.Linear(features_dim, 1)

    def extract_features(self, obs):
        return self.linear(self.cnn(obs.float() / 255.0))

    def forward(self, obs):
        features = self.extract_features(obs)
        distribution = Categorical(logits=self.action_net(features))
        actions = distribution.sample()
        return actions, self.value_net(features), distribution.log_prob(actions)

    def evaluate_actions(self, obs, actions):
        features = self.extract_features(obs)
        distribution = Categorical(logits=self.action_net(features))
        return self.value_net(features), distribution.log_prob(actions), distribution.entropy()
