"""A trainer with an evaluation between its steps, as ParallelWaveGAN has it."""

import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.generator = nn.Sequential(
            nn.Conv1d(1, 32, 9, padding=4),
            nn.Tanh(),
            nn.Conv1d(32, 32, 9, padding=4),
            nn.Tanh(),
            nn.Conv1d(32, 1, 9, padding=4),
        ).to("cuda")
        self.optimizer = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.total_eval_loss = 0.0

    def _train_step(self, batch):
        loss = (self.generator(batch) - batch).abs().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def _eval_step(self, batch):
        made = self.generator(batch)
        self.total_eval_loss += (made - batch).square().mean().item()

    def _eval_epoch(self):
        self.generator.eval()
        for _ in range(2):
            self._eval_step(torch.randn(16, 1, 4096, device="cuda"))
        self.generator.train()


def main():
    torch.manual_seed(0)
    trainer = Trainer()
    for step in range(6):
        trainer._train_step(torch.randn(4, 1, 4096, device="cuda"))
        if step % 3 == 2:
            trainer._eval_epoch()


if __name__ == "__main__":
    main()
