import gc

import torch
from torch import nn

gc.disable()


class Recorder:
    def __init__(self, learner):
        self.learner = learner
        self.losses = []

    def after_step(self, loss):
        self.losses.append(loss.item())


class Learner:
    def __init__(self, model, lr=1e-3):
        self.model = model
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.callbacks = [Recorder(self)]

    def fit(self, steps):
        for _ in range(steps):
            x = torch.randn(256, 1024, device="cuda")
            loss = self.model(x).pow(2).mean()
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            for callback in self.callbacks:
                callback.after_step(loss)


for fold in range(5):
    model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda()
    learner = Learner(model)
    learner.fit(3)
    del model, learner
    print(fold, torch.cuda.memory_allocated() >> 20)
