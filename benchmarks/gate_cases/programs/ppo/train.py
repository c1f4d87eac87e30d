"""Trains an agent on random pictures."""

import json

import torch

from ppo.env import RandomVecEnv
from ppo.ppo import PPO


def main():
    with open("hyperparams.json") as file:
        params = json.load(file)
    torch.manual_seed(3)
    env = RandomVecEnv(params["n_envs"])
    PPO(env, params).learn(params["total_updates"])


if __name__ == "__main__":
    main()
