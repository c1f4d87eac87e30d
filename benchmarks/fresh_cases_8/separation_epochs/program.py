"""Two speakers from one mixture: a brain with stages for training and for validation."""

import torch
from torch import nn


class Brain:
    def __init__(self, modules, lr):
        self.modules = modules
        self.optimizer = torch.optim.SGD(modules.parameters(), lr)

    def fit_batch(self, batch):
        self.optimizer.zero_grad()
        loss = self.compute_objectives(self.compute_forward(batch), batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach().cpu()

    @torch.no_grad()
    def evaluate_batch(self, batch):
        return self.compute_objectives(self.compute_forward(batch), batch).cpu()

    def fit(self, epochs, train_set, valid_set):
        for epoch in range(epochs):
            self._fit_train(train_set)
            self._fit_valid(epoch, valid_set)

    def _fit_train(self, train_set):
        self.modules.train()
        self.train_loss = sum(self.fit_batch(batch) for batch in train_set()).item()

    def _fit_valid(self, epoch, valid_set):
        self.modules.eval()
        valid_loss = sum(self.evaluate_batch(batch) for batch in valid_set()).item()
        print(epoch, self.train_loss, valid_loss)


class Separation(Brain):
    def compute_forward(self, batch):
        mix = self.modules.encoder(batch["mix"].unsqueeze(1)).relu()
        masks = self.modules.masknet(mix.transpose(1, 2)).sigmoid().unflatten(2, (2, -1))
        parts = [mix * masks[:, :, speaker].transpose(1, 2) for speaker in range(2)]
        return torch.stack([self.modules.decoder(part).squeeze(1) for part in parts])

    def compute_objectives(self, predictions, batch):
        return (predictions - batch["sources"]).square().mean()


class Modules(nn.Module):
    def __init__(self, channels=256, width=2048):
        super().__init__()
        self.encoder = nn.Conv1d(1, channels, 16, stride=8)
        self.masknet = nn.Sequential(
            nn.Linear(channels, width),
            nn.PReLU(),
            nn.Linear(width, width),
            nn.PReLU(),
            nn.Linear(width, 2 * channels),
        )
        self.decoder = nn.ConvTranspose1d(channels, 1, 16, stride=8)


def mixtures(batches, size, samples):
    def generate():
        for _ in range(batches):
            sources = torch.randn(2, size, samples).cuda()
            yield {"mix": sources.sum(0), "sources": sources}

    return generate


if __name__ == "__main__":
    torch.manual_seed(0)
    brain = Separation(Modules().cuda(), lr=1e-3)
    brain.fit(2, mixtures(3, 2, 1608), mixtures(2, 4, 8008))
