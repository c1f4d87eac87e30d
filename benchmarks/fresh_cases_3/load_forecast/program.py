import torch
import torch.nn.functional as F
from torch import nn


def sliding_window(series, length, horizon):
    """Windows of the past, (windows, variables, length), and what follows each."""
    windows = series.unfold(0, length + horizon, 1)
    x = windows[:, :, :length].contiguous()
    y = windows[:, 0, length:].contiguous()
    return x, y


class Splits:
    def __init__(self, count, valid=0.2):
        cut = int(count * (1 - valid))
        self.train, self.valid = torch.arange(cut), torch.arange(cut, count)


class TSDatasets:
    def __init__(self, x, y, splits, device):
        self.x, self.y = x.to(device), y.to(device)
        self.splits = splits

    def subset(self, name):
        return getattr(self.splits, name)


class TSDataLoader:
    def __init__(self, datasets, name, batch_size, shuffle):
        self.datasets, self.batch_size, self.shuffle = datasets, batch_size, shuffle
        self.index = datasets.subset(name)

    def __len__(self):
        return -(-len(self.index) // self.batch_size)

    def __iter__(self):
        order = torch.randperm(len(self.index)) if self.shuffle else torch.arange(len(self.index))
        for part in self.index[order].split(self.batch_size):
            part = part.to(self.datasets.x.device)
            yield self.datasets.x[part], self.datasets.y[part]


class InceptionModule(nn.Module):
    def __init__(self, inputs, filters=16, kernels=(9, 19, 39)):
        super().__init__()
        self.bottleneck = nn.Conv1d(inputs, filters, 1, bias=False)
        self.convs = nn.ModuleList(
            nn.Conv1d(filters, filters, k, padding=k // 2, bias=False) for k in kernels
        )
        self.norm = nn.BatchNorm1d(len(kernels) * filters)

    def forward(self, x):
        x = self.bottleneck(x)
        return F.relu(self.norm(torch.cat([conv(x) for conv in self.convs], dim=1)))


class Forecaster(nn.Module):
    def __init__(self, variables, horizon):
        super().__init__()
        self.body = nn.Sequential(InceptionModule(variables), InceptionModule(48))
        self.head = nn.Linear(48, horizon)

    def forward(self, x):
        return self.head(self.body(x).mean(-1))


class Learner:
    def __init__(self, train, valid, model, lr):
        self.train_loader, self.valid_loader = train, valid
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for x, y in self.train_loader:
                loss = F.mse_loss(self.model(x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            print(epoch, loss.item(), self.validate())

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        losses = [F.mse_loss(self.model(x), y).item() for x, y in self.valid_loader]
        return sum(losses) / len(losses)


def main():
    torch.manual_seed(0)
    series = torch.randn(8760, 24).cumsum(0) / 100
    x, y = sliding_window(series, length=168, horizon=24)
    datasets = TSDatasets(x, y, Splits(len(x)), device="cuda")
    train = TSDataLoader(datasets, "train", 256, shuffle=True)
    valid = TSDataLoader(datasets, "valid", 256, shuffle=False)
    Learner(train, valid, Forecaster(24, 24).cuda(), lr=1e-3).fit(1)


if __name__ == "__main__":
    main()
