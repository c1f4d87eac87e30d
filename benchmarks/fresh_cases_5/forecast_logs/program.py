import torch
from torch import nn


class QuantileLoss:
    def __init__(self, quantiles=(0.1, 0.5, 0.9)):
        self.quantiles = quantiles

    def __call__(self, prediction, target):
        errors = target.unsqueeze(-1) - prediction
        parts = [
            torch.max((q - 1) * errors[..., i], q * errors[..., i])
            for i, q in enumerate(self.quantiles)
        ]
        return torch.stack(parts, -1).mean()


class BaseModel(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss
        self.training_step_outputs = []
        self.validation_step_outputs = []

    def step(self, x, y):
        prediction = self(x)
        loss = self.loss(prediction, y)
        again = self(x + 0.01 * torch.randn_like(x))
        smooth = (again - prediction.detach()).abs().mean()
        log = {"loss": loss, "smoothness": smooth, "n_samples": len(x)}
        return log, {"prediction": prediction}

    def training_step(self, batch):
        log, _ = self.step(*batch)
        self.training_step_outputs.append(log)
        return log

    def on_epoch_end(self, outputs):
        total = sum(log["n_samples"] for log in outputs)
        mean = sum(log["smoothness"].item() * log["n_samples"] for log in outputs) / total
        outputs.clear()
        return mean


class Forecaster(BaseModel):
    def __init__(self, features=12, hidden=256, quantiles=3):
        super().__init__(QuantileLoss())
        self.lstm = nn.LSTMCell(features, hidden)
        self.mix = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.ReLU())
        self.out = nn.Linear(4 * hidden, quantiles)

    def forward(self, x):
        state, outputs = None, []
        for t in range(x.shape[1]):
            state = self.lstm(x[:, t], state)
            outputs.append(self.out(self.mix(state[0])))
        return torch.stack(outputs, 1)


class Trainer:
    def __init__(self, epochs):
        self.epochs = epochs

    def fit(self, model, loader):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for epoch in range(self.epochs):
            for batch in loader:
                log = model.training_step([x.cuda() for x in batch])
                optimizer.zero_grad()
                log["loss"].backward()
                optimizer.step()
            print(epoch, model.on_epoch_end(model.training_step_outputs))


def series(batches, size=256, length=24):
    return [(torch.randn(size, length, 12), torch.randn(size, length)) for _ in range(batches)]


def main():
    torch.manual_seed(0)
    Trainer(epochs=2).fit(Forecaster().cuda(), series(6))


if __name__ == "__main__":
    main()
