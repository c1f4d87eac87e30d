import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tissue(nn.Module):
    def __init__(self, width=16, classes=6):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, classes, 1)
        )

    def forward(self, x):
        return self.layers(x)


class PredictionLoop:
    """Calls back with the prediction of each tile; also returns all of them, unless told not to."""

    def __init__(self, model, on_batch, return_predictions=True):
        self.model, self.on_batch = model, on_batch
        self.return_predictions = return_predictions
        self.epoch_predictions = []

    @torch.no_grad()
    def run(self, loader):
        self.model.eval()
        self.epoch_predictions.append([])
        for (tiles,) in loader:
            prediction = self.model(tiles.cuda()).softmax(1)
            self.on_batch(prediction)
            if self.return_predictions:
                self.epoch_predictions[-1].append(prediction)
        self.model.train()
        return self.epoch_predictions


class AreaWriter:
    def __init__(self):
        self.areas = []

    def __call__(self, prediction):
        self.areas.append(prediction.mean((0, 2, 3)).cpu())


def train_epoch(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
    return loss.item()


model, writer = Tissue().cuda(), AreaWriter()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
patches = TensorDataset(torch.randn(16, 3, 96, 96), torch.randint(0, 6, (16, 96, 96)))
slide = TensorDataset(torch.randn(32, 3, 192, 192))
predictor = PredictionLoop(model, writer)
for epoch in range(3):
    loss = train_epoch(model, optimizer, DataLoader(patches, batch_size=4))
    predictor.run(DataLoader(slide, batch_size=4))
    print(epoch, loss, len(writer.areas), torch.cuda.memory_allocated() >> 20)
