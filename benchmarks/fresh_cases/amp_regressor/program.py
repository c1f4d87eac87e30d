import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(nn.Module):
    def __init__(self, features=128, width=2048, depth=5):
        super().__init__()
        sizes = [features] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).squeeze(1)


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, foreach=False)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def fit(self, loader):
        total = 0.0
        for x, y in loader:
            total += self.step(x.cuda(), y.cuda())
        return total / len(loader)

    @torch.no_grad()
    def evaluate(self, loader):
        error = 0.0
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                predicted = self.model(x.cuda())
            error += (predicted.float().cpu() - y).abs().sum().item()
        return error / len(loader.dataset)


data = TensorDataset(torch.randn(8192, 128), torch.randn(8192))
train, valid = torch.utils.data.random_split(data, [6144, 2048])
trainer = Trainer(Regressor().cuda(), lr=0.01)
for epoch in range(2):
    loss = trainer.fit(DataLoader(train, batch_size=2048, shuffle=True))
    print(epoch, loss, trainer.evaluate(DataLoader(valid, batch_size=1024)))
