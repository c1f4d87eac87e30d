"""Reinforcement learning: stable-baselines3, torchrl, tensordict."""

from __future__ import annotations

from typing import Any

from foreign.programs import program


def _baseline(cls: Any, environment: str, device: str, steps: int, **more: Any) -> list[float]:
    model = cls("MlpPolicy", environment, device=device, seed=0, **more)
    model.learn(total_timesteps=steps)
    return [sum(float(p.detach().double().abs().sum()) for p in model.policy.parameters())]


@program("stable-baselines3/a2c", "stable_baselines3", "gymnasium")
def a2c(device: str) -> Any:
    from stable_baselines3 import A2C

    return _baseline(A2C, "CartPole-v1", device, 20)


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
