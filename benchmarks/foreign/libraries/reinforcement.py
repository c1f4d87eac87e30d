"""Reinforcement learning: stable-baselines3, torchrl, tensordict."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


def _baseline(cls: Any, environment: str, device: str, steps: int, **more: Any) -> list[float]:
    model = cls("MlpPolicy", environment, device=device, seed=0, **more)
    model.learn(total_timesteps=steps)
    return [sum(float(p.detach().double().abs().sum()) for p in model.policy.parameters())]


@program("stable-baselines3/ppo", "stable_baselines3", "gymnasium")
def ppo(device: str) -> Any:
    from stable_baselines3 import PPO

    return _baseline(PPO, "CartPole-v1", device, 64, n_steps=32, batch_size=16, n_epochs=2)


@program("stable-baselines3/a2c", "stable_baselines3", "gymnasium")
def a2c(device: str) -> Any:
    from stable_baselines3 import A2C

    return _baseline(A2C, "CartPole-v1", device, 20)


@program("stable-baselines3/dqn", "stable_baselines3", "gymnasium")
def dqn(device: str) -> Any:
    from stable_baselines3 import DQN

    return _baseline(
        DQN, "CartPole-v1", device, 60, learning_starts=20, batch_size=8, buffer_size=100
    )


@program("stable-baselines3/sac", "stable_baselines3", "gymnasium")
def sac(device: str) -> Any:
    from stable_baselines3 import SAC

    return _baseline(
        SAC, "Pendulum-v1", device, 30, learning_starts=20, batch_size=8, buffer_size=100
    )


@program("torchrl/ppo-loss", "torchrl.objectives", "torchrl.modules", "tensordict.nn")
def torchrl_ppo(device: str) -> Any:
    import torch
    from tensordict import TensorDict
    from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
    from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    policy = ProbabilisticActor(
        TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    ).to(device)
    assert isinstance(policy, ProbabilisticTensorDictSequential)
    value = ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"]).to(device)
    data = TensorDict(
        {
            "observation": torch.randn(2, 5, 4),
            "action": torch.nn.functional.one_hot(torch.arange(10).reshape(2, 5) % 2, 2),
            "action_log_prob": torch.full((2, 5), -0.7),
            "next": TensorDict(
                {
                    "observation": torch.randn(2, 5, 4),
                    "reward": torch.randn(2, 5, 1),
                    "done": torch.zeros(2, 5, 1, dtype=torch.bool),
                    "terminated": torch.zeros(2, 5, 1, dtype=torch.bool),
                },
                [2, 5],
            ),
        },
        [2, 5],
    ).to(device)
    GAE(gamma=0.99, lmbda=0.95, value_network=value)(data)
    loss_of = ClipPPOLoss(policy, value)
    optimizer = torch.optim.Adam(loss_of.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        parts = loss_of(data.reshape(-1))
        loss = parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@program("torchrl/dqn-replay", "torchrl.objectives", "torchrl.modules", "torchrl.data")
def torchrl_dqn(device: str) -> Any:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, OneHot, TensorDictReplayBuffer
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    actor = QValueActor(torch.nn.Linear(4, 2), in_keys=["observation"], spec=OneHot(2)).to(device)
    loss_of = DQNLoss(actor, action_space="one_hot", delay_value=True)
    updater = SoftUpdate(loss_of, eps=0.9)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(32, device=device),
        batch_size=8,
    )
    rows = TensorDict(
        {
            "observation": torch.randn(16, 4),
            "action": torch.nn.functional.one_hot(torch.arange(16) % 2, 2),
            "next": TensorDict(
                {
                    "observation": torch.randn(16, 4),
                    "reward": torch.randn(16, 1),
                    "done": torch.zeros(16, 1, dtype=torch.bool),
                    "terminated": torch.zeros(16, 1, dtype=torch.bool),
                },
                [16],
            ),
        },
        [16],
    )
    buffer.extend(rows)
    optimizer = torch.optim.Adam(loss_of.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        loss = loss_of(buffer.sample().to(device))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updater.step()
        losses.append(loss.item())
    return losses


@program("torchrl/collector-cartpole", "torchrl.envs", "torchrl.collectors", "torchrl.modules")
def collector(device: str) -> Any:
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import QValueActor

    environment = GymEnv("CartPole-v1", device=device)
    environment.set_seed(0)
    net = nn.Linear(4, 2).to(device)
    actor = QValueActor(net, in_keys=["observation"], spec=environment.action_spec)
    found = []
    for data in Collector(environment, actor, frames_per_batch=8, total_frames=16, device=device):
        loss = (net(data["observation"]).max(-1).values - 1).square().mean()
        loss.backward()
        found.append(loss.item())
    return found


@program("tensordict/modules", "tensordict", "tensordict.nn")
def tensordict(device: str) -> Any:
    import torch
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    model = TensorDictSequential(
        TensorDictModule(torch.nn.Linear(4, 8), in_keys=["x"], out_keys=["h"]),
        TensorDictModule(torch.nn.Linear(8, 1), in_keys=["h"], out_keys=["y"]),
    ).to(device)
    data = TensorDict({"x": torch.randn(6, 4), "mask": torch.arange(6) > 2}, [6]).to(device)

    def loss() -> Any:
        out = model(data.clone())
        chosen = out[out["mask"]]
        return chosen["y"].square().mean() + torch.stack([data, data])["x"].mean()

    return steps_of(model, loss)
