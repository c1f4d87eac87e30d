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


@program("fastai/vision-learner", "fastai.vision.all")
def fastai_vision(device: str) -> Any:
    import torch
    from fastai.vision.all import DataLoaders, Learner, accuracy

    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(1568, 2)
    )
    rows = [(torch.randn(3, 16, 16), torch.tensor(i % 2)) for i in range(16)]
    loaders = DataLoaders.from_dsets(rows[:12], rows[12:], bs=4, device=torch.device(device))
    learner = Learner(loaders, model, loss_func=torch.nn.CrossEntropyLoss(), metrics=accuracy)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(1, 1e-3)
    return [float(value) for value in learner.recorder.losses]


@program("fastai/tabular", "fastai.tabular.all", "pandas")
def fastai_tabular(device: str) -> Any:
    import pandas as pd
    import torch
    from fastai.tabular.all import (
        Categorify,
        CategoryBlock,
        FillMissing,
        Normalize,
        TabularDataLoaders,
        tabular_learner,
    )

    table = pd.DataFrame(
        {
            "job": ["a", "b", "c", "a"] * 8,
            "age": [float(i) for i in range(32)],
            "rich": ["yes", "no"] * 16,
        }
    )
    loaders = TabularDataLoaders.from_df(
        table,
        procs=[Categorify, FillMissing, Normalize],
        cat_names=["job"],
        cont_names=["age"],
        y_names="rich",
        y_block=CategoryBlock(),
        valid_idx=list(range(24, 32)),
        bs=8,
        device=torch.device(device),
    )
    learner = tabular_learner(loaders, layers=[16])
    with learner.no_bar(), learner.no_logging():
        learner.fit(1, 1e-2)
    return [float(value) for value in learner.recorder.losses]


@program("skorch/classifier", "skorch")
def skorch(device: str) -> Any:
    import numpy as np
    import torch
    from skorch import NeuralNetClassifier

    net = NeuralNetClassifier(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)),
        criterion=torch.nn.CrossEntropyLoss,
        max_epochs=2,
        lr=0.1,
        batch_size=8,
        device=device,
        verbose=0,
    )
    draw = np.random.default_rng(0)
    net.fit(draw.standard_normal((32, 8), dtype=np.float32), np.arange(32) % 2)
    return [row["train_loss"] for row in net.history]


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


@program("torchmetrics/regression-and-retrieval", "torchmetrics")
def more_metrics(device: str) -> Any:
    import torch
    from torchmetrics.image import PeakSignalNoiseRatio, StructuralSimilarityIndexMeasure
    from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef
    from torchmetrics.retrieval import RetrievalMAP

    a, b = torch.rand(2, 3, 16, 16).to(device), torch.rand(2, 3, 16, 16).to(device)
    x, y = torch.rand(20).to(device), torch.rand(20).to(device)
    queries = (torch.arange(20) // 5).to(device)
    return [
        PeakSignalNoiseRatio(data_range=1.0).to(device)(a, b).item(),
        StructuralSimilarityIndexMeasure(data_range=1.0).to(device)(a, b).item(),
        PearsonCorrCoef().to(device)(x, y).item(),
        SpearmanCorrCoef().to(device)(x, y).item(),
        RetrievalMAP().to(device)(x, y > 0.5, indexes=queries).item(),
    ]
