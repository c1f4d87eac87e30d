"""A buffer of recorded motions on the GPU, from which a behaviour model is trained."""

import torch
from torch import nn


class TrajectoryBuffer:
    """Episodes of different lengths; windows of them are sampled."""

    def __init__(self, capacity, device):
        self.capacity, self.device = capacity, device
        self.storage, self.lengths = [], []
        self._idx = 0

    def __len__(self):
        return min(self._idx, self.capacity)

    def initialize_storage(self, episode):
        for _ in range(self.capacity):
            slot = {}
            for key, value in episode.items():
                slot[key] = torch.zeros((self.capacity, value.shape[1]), device=self.device)
            self.storage.append(slot)
            self.lengths.append(0)

    def extend(self, episodes):
        for episode in episodes:
            if not self.storage:
                self.initialize_storage(episode)
            at = self._idx % self.capacity
            length = len(episode["observation"])
            for key, value in episode.items():
                self.storage[at][key][:length] = value.to(self.device)
            self.lengths[at] = length
            self._idx += 1

    def sample(self, batch_size, window=8):
        parts = []
        for at in torch.randint(0, len(self), (batch_size,)).tolist():
            start = int(torch.randint(0, self.lengths[at] - window, ()))
            slot = self.storage[at]
            parts.append({key: slot[key][start : start + window] for key in slot})
        return {key: torch.stack([part[key] for part in parts]) for key in parts[0]}


def motions(count, obs=512, qpos=64, longest=48):
    for _ in range(count):
        length = int(torch.randint(24, longest + 1, ()))
        yield {"observation": torch.randn(length, obs), "qpos": torch.randn(length, qpos)}


def train(buffer, steps):
    model = nn.Sequential(nn.Linear(512, 512), nn.Mish(), nn.Linear(512, 64)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for step in range(steps):
        batch = buffer.sample(32)
        loss = (model(batch["observation"]) - batch["qpos"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    torch.manual_seed(0)
    buffer = TrajectoryBuffer(capacity=160, device="cuda")
    buffer.extend(motions(160))
    train(buffer, 4)
