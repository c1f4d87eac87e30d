"""Fourteen findings on chest X-rays: a trainer made of static methods, with a validation loss."""

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau


class DenseLayer(nn.Sequential):
    def __init__(self, channels, growth):
        super().__init__(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, growth, 3, padding=1),
        )

    def forward(self, x):
        return torch.cat([x, super().forward(x)], 1)


class DenseNet(nn.Module):
    def __init__(self, nnClassCount, growth=16, layers=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, stride=2, padding=3)
        self.block = nn.Sequential(*(DenseLayer(32 + i * growth, growth) for i in range(layers)))
        self.classifier = nn.Sequential(nn.Linear(32 + layers * growth, nnClassCount), nn.Sigmoid())

    def forward(self, x):
        return self.classifier(self.block(self.stem(x)).mean((2, 3)))


class ChestTrainer:
    @staticmethod
    def train(model, dataLoaderTrain, dataLoaderVal, trMaxEpoch):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=1e-5)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=5)
        loss = nn.BCELoss()
        lossMIN = 100000
        for epochID in range(trMaxEpoch):
            ChestTrainer.epochTrain(model, dataLoaderTrain, optimizer, loss)
            lossVal, losstensor = ChestTrainer.epochVal(model, dataLoaderVal, loss)
            scheduler.step(float(losstensor))
            if lossVal < lossMIN:
                lossMIN = lossVal
                print(f"Epoch [{epochID + 1}] [save] loss= {lossVal:.4f}")

    @staticmethod
    def epochTrain(model, dataLoader, optimizer, loss):
        model.train()
        for varInput, target in dataLoader():
            lossvalue = loss(model(varInput), target)
            optimizer.zero_grad()
            lossvalue.backward()
            optimizer.step()

    @staticmethod
    def epochVal(model, dataLoader, loss):
        model.eval()
        lossVal, lossValNorm, losstensorMean = 0, 0, 0
        for varInput, target in dataLoader():
            varOutput = model(varInput)
            losstensor = loss(varOutput, target)
            losstensorMean += losstensor
            lossVal += losstensor.item()
            lossValNorm += 1
        return lossVal / lossValNorm, losstensorMean / lossValNorm


def loader(batches, size, classes=14):
    def images():
        for _ in range(batches):
            target = torch.randint(0, 2, (size, classes)).float()
            yield torch.rand(size, 3, 96, 96).cuda(), target.cuda()

    return images


if __name__ == "__main__":
    torch.manual_seed(0)
    ChestTrainer.train(DenseNet(14).cuda(), loader(3, 8), loader(6, 8), 2)
