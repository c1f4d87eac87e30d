"""Trainers and their metrics: Lightning, fastai, skorch, torchmetrics."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


@program("lightning/trainer", "lightning.pytorch")
def lightning(device: str) -> Any:
    import lightning.pytorch as pl
    import torch

    found: list[float] = []

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
            )

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.net(x), y)
            self.log("train_loss", loss, prog_bar=True)
            found.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("val_loss", torch.nn.functional.cross_entropy(self.net(x), y))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 0.01)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
                    "monitor": "val_loss",
                },
            }

    pl.seed_everything(0, verbose=False)
    rows = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.arange(16) % 2)
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        gradient_clip_val=1.0,
        callbacks=[
            pl.callbacks.EarlyStopping("val_loss", patience=3),
            pl.callbacks.ModelCheckpoint(monitor="val_loss", dirpath="checkpoints"),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), loader, loader)
    return found


@program("lightning/manual-gan", "lightning.pytorch")
def gan(device: str) -> Any:
    import lightning.pytorch as pl
    import torch

    found: list[float] = []

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.make = torch.nn.Sequential(
                torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)
            )
            self.judge = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.LeakyReLU(), torch.nn.Linear(16, 1)
            )

        def training_step(self, batch: Any, index: int) -> None:
            real, noise = batch
            of_make, of_judge = self.optimizers()
            bce = torch.nn.functional.binary_cross_entropy_with_logits
            made = self.make(noise)
            right = self.judge(real)
            loss = bce(right, torch.ones_like(right))
            wrong = self.judge(made.detach())
            loss = loss + bce(wrong, torch.zeros_like(wrong))
            of_judge.zero_grad()
            self.manual_backward(loss)
            of_judge.step()
            again = self.judge(made)
            other = bce(again, torch.ones_like(again))
            of_make.zero_grad()
            self.manual_backward(other)
            of_make.step()
            found.extend([loss.item(), other.item()])

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(self.make.parameters(), 1e-3),
                torch.optim.Adam(self.judge.parameters(), 1e-3),
            ]

    rows = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 4))
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Gan(), torch.utils.data.DataLoader(rows, batch_size=4))
    return found


@program("torchmetrics/while-training", "torchmetrics")
def metrics(device: str) -> Any:
    import torch
    from torchmetrics import MetricCollection
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassAUROC,
        MulticlassConfusionMatrix,
        MulticlassF1Score,
    )

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3).to(device)
    measured = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3),
            "f1": MulticlassF1Score(3),
            "auroc": MulticlassAUROC(3, thresholds=10),
        }
    ).to(device)
    confusion = MulticlassConfusionMatrix(3).to(device)
    x, y = torch.randn(12, 8).to(device), (torch.arange(12) % 3).to(device)

    def loss() -> Any:
        out = model(x)
        measured.update(out.softmax(-1), y)
        confusion.update(out.argmax(-1), y)
        return torch.nn.functional.cross_entropy(out, y)

    found = steps_of(model, loss, lr=0.1)
    return [
        *found,
        *(value.item() for value in measured.compute().values()),
        confusion.compute().sum(),
    ]
