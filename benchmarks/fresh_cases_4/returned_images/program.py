import torch
import torch.nn.functional as F
from torch import nn


class ConvBlock(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU())


class DeepLab(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.encoder = nn.Sequential(ConvBlock(3, 16), nn.MaxPool2d(2), ConvBlock(16, 32))
        self.head = nn.Conv2d(32, classes, 1)

    def forward(self, x):
        return F.interpolate(self.head(self.encoder(x)), scale_factor=2, mode="bilinear")


class SegmentationModule(nn.Module):
    def __init__(self, classes=16):
        super().__init__()
        self.model = DeepLab(classes)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        outputs = self.model(inputs)
        loss = F.cross_entropy(outputs, labels)
        return {"loss": loss, "preds": outputs.detach(), "inputs": inputs, "labels": labels}

    def training_epoch_end(self, outputs):
        loss = torch.stack([x["loss"].detach() for x in outputs]).mean()
        return {"Train/Loss": loss.item()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class LogMediaCallback:
    def __init__(self, logger, samples=2):
        self.logger, self.samples = logger, samples

    def on_train_epoch_end(self, trainer, module):
        last = trainer.outputs[-1]
        images = last["preds"][: self.samples].argmax(1).to(torch.uint8)
        self.logger.append(images.cpu())


class Trainer:
    def __init__(self, max_epochs, callbacks):
        self.max_epochs, self.callbacks = max_epochs, callbacks
        self.outputs = []
        self.metrics = []

    def fit(self, module, loader):
        module.cuda().train()
        optimizer = module.configure_optimizers()
        for _ in range(self.max_epochs):
            self.outputs = []
            for index, batch in enumerate(loader):
                batch = tuple(x.cuda() for x in batch)
                self.outputs.append(self._run_batch(module, optimizer, batch, index))
            self.metrics.append(module.training_epoch_end(self.outputs))
            for callback in self.callbacks:
                callback.on_train_epoch_end(self, module)

    @staticmethod
    def _run_batch(module, optimizer, batch, index):
        output = module.training_step(batch, index)
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
        return output


class Scenes:
    def __init__(self, batches, size, side):
        self.batches, self.size, self.side = batches, size, side

    def __iter__(self):
        for _ in range(self.batches):
            images = torch.rand(self.size, 3, self.side, self.side)
            yield images, torch.randint(0, 16, (self.size, self.side, self.side))


def main():
    torch.manual_seed(0)
    log = []
    trainer = Trainer(2, [LogMediaCallback(log)])
    trainer.fit(SegmentationModule(), Scenes(8, 4, 192))
    print(trainer.metrics, len(log))


if __name__ == "__main__":
    main()
