"""What a task implements."""

import torch.nn as nn


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.trainer = None
        self.logged = {}

    def log(self, name, value):
        self.logged[name] = self.trainer.metric(value)

    def training_step(self, batch):
        raise NotImplementedError

    def validation_step(self, batch):
        raise NotImplementedError

    def configure_optimizers(self):
        raise NotImplementedError
