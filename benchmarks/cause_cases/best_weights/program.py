import copy

import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(
            *[m for _ in range(5) for m in (nn.Linear(2048, 2048), nn.ReLU())]
        ).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.metrics = []
        self.best_model = None

    def train_epoch(self):
        for _ in range(2):
            loss = self.model(torch.randn(2048, 2048, device="cuda")).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self):
        metric = self.model(torch.randn(512, 2048, device="cuda")).pow(2).mean().item()
        self.metrics.append(metric)
        self.best_model = copy.deepcopy(self.model.state_dict())


trainer = Trainer()
for epoch in range(3):
    trainer.train_epoch()
    trainer.evaluate()
trainer.model.load_state_dict(trainer.best_model)
print(trainer.metrics)
