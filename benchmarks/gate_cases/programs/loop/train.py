"""Trains a translation model, as run.json describes it."""

import json

import torch

from loop.callbacks import REGISTRY
from loop.trainer import Trainer
from tasks.data import Sentences
from tasks.translation import Translation


def main():
    with open("run.json") as file:
        run = json.load(file)
    torch.manual_seed(0)
    module = Translation(**run["model"])
    data = Sentences(run["model"]["vocab_size"], **run["data"])
    callbacks = [REGISTRY[name]() for name in run["callbacks"]]
    trainer = Trainer(callbacks=callbacks, **run["trainer"])
    trainer.fit(module, data)
    print({name: round(float(value), 3) for name, value in module.logged.items()})


if __name__ == "__main__":
    main()
