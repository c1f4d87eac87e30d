import copy

import torch
import torch.nn.functional as F
from torch import nn


class Metric:
    """States that are added once, updated for each batch and reset for each epoch."""

    def __init__(self):
        self._defaults = {}

    def add_state(self, name, default):
        self._defaults[name] = copy.deepcopy(default)
        setattr(self, name, copy.deepcopy(default))

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, copy.deepcopy(default))

    def __call__(self, *args):
        self.update(*args)


class RetrievalMRR(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("preds", [])
        self.add_state("target", [])

    def update(self, preds, target):
        self.preds.append(preds)
        self.target.append(target)

    def compute(self):
        ranks = []
        for preds, target in zip(self.preds, self.target):
            own = preds.gather(1, target[:, None])
            ranks.append(1.0 / (preds > own).sum(1).add(1).float())
        return torch.cat(ranks).mean()


class MetricCollection(dict):
    def __call__(self, *args):
        for metric in self.values():
            metric(*args)

    def clone(self, prefix):
        return MetricCollection({prefix + name: copy.deepcopy(m) for name, m in self.items()})

    def compute(self):
        return {name: metric.compute().item() for name, metric in self.items()}

    def reset(self):
        for metric in self.values():
            metric.reset()


class Tower(nn.Module):
    def __init__(self, features, width=512, dim=128):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, dim),
        )

    def forward(self, x):
        return F.normalize(self.layers(x), dim=-1)


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.item = Tower(256), Tower(384)
        self.temperature = nn.Parameter(torch.tensor(2.6))
        metrics = MetricCollection({"mrr": RetrievalMRR()})
        self.train_metrics = metrics.clone("train_")
        self.valid_metrics = metrics.clone("valid_")

    def shared_step(self, batch):
        queries, items = (part.cuda() for part in batch)
        logits = self.query(queries) @ self.item(items).T * self.temperature.exp()
        targets = torch.arange(len(logits), device=logits.device)
        return logits, targets, F.cross_entropy(logits, targets)

    def training_step(self, batch):
        logits, targets, loss = self.shared_step(batch)
        self.train_metrics(logits, targets)
        return loss

    def validation_step(self, batch):
        logits, targets, _ = self.shared_step(batch)
        self.valid_metrics(logits, targets)


class Trainer:
    def __init__(self, epochs):
        self.epochs = epochs

    def fit(self, model, train, valid):
        model.cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(self.epochs):
            model.train()
            for batch in train:
                loss = model.training_step(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for batch in valid:
                    model.validation_step(batch)
            values = model.train_metrics.compute() | model.valid_metrics.compute()
            print(epoch, loss.item(), values)
            model.train_metrics.reset()
            model.valid_metrics.reset()


def pairs(count):
    data = torch.utils.data.TensorDataset(torch.randn(count, 256), torch.randn(count, 384))
    return torch.utils.data.DataLoader(data, batch_size=2048, drop_last=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(epochs=2).fit(DualEncoder(), pairs(16384), pairs(2048))
