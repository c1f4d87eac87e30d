import torch
from torch import nn


class ActuatorNet(nn.Module):
    """A learned model of the motors: torques from the errors of the last positions."""

    def __init__(self, history=3, width=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2 * history, width),
            nn.Softsign(),
            nn.Linear(width, width),
            nn.Softsign(),
            nn.Linear(width, 1),
        )

    def forward(self, errors, velocities):
        return self.net(torch.cat([errors, velocities], -1)).squeeze(-1)


class LeggedRobot:
    def __init__(self, robots, joints=12, device="cuda"):
        self.actuators = ActuatorNet().to(device)
        shape = (robots, joints, 3)
        self.errors, self.velocities = (
            torch.zeros(shape, device=device),
            torch.zeros(shape, device=device),
        )
        self.positions = torch.zeros(shape[:2], device=device)
        self.speed = torch.zeros(shape[:2], device=device)
        self.dt = 0.005

    def compute_torques(self, actions):
        error = (actions * 0.25 - self.positions).unsqueeze(-1)
        self.errors = torch.cat([error, self.errors[..., :-1]], -1)
        self.velocities = torch.cat([self.speed.unsqueeze(-1), self.velocities[..., :-1]], -1)
        return self.actuators(self.errors, self.velocities)

    def step(self, actions):
        torques = self.compute_torques(actions.clamp(-10, 10))
        self.speed = self.speed + self.dt * torques
        self.positions = self.positions + self.dt * self.speed
        return self.observations(), -torques.detach().square().mean(-1)

    def observations(self):
        return torch.cat([self.positions, self.speed], -1).detach()


class Policy(nn.Module):
    def __init__(self, inputs=24, outputs=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 256), nn.ELU(), nn.Linear(256, outputs))

    def forward(self, observations):
        return self.net(observations)


def play(env, policy, steps):
    rewards = []
    observations = env.observations()
    for _ in range(steps):
        with torch.no_grad():
            actions = policy(observations)
        observations, reward = env.step(actions)
        rewards.append(reward.mean().item())
    return sum(rewards)


def main():
    torch.manual_seed(0)
    env = LeggedRobot(robots=256)
    print(play(env, Policy().cuda().eval(), steps=30))


if __name__ == "__main__":
    main()
