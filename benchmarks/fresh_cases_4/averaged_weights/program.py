import itertools

import torch
import torch.nn.functional as F
from torch import nn


class ShadowModel:
    def __init__(self, model):
        self.param_list = [p.data.clone() for p in model.parameters()]
        self.buffer_list = [b.data.clone() for b in model.buffers()]

    def parameters(self):
        return self.param_list


def compute_ema(model, ema_model, smoothing):
    with torch.no_grad():
        for source, target in zip(model.parameters(), ema_model.parameters()):
            target.mul_(smoothing).add_(source, alpha=1 - smoothing)


class Event:
    FIT_START, BATCH_END, EVAL_START, EVAL_END = range(4)


class EMA:
    def __init__(self, half_life=100, update_interval=1):
        self.smoothing = 2 ** (-update_interval / half_life)
        self.ema_model = None
        self.training_model = None

    def match(self, event):
        return True

    def apply(self, event, state):
        if event == Event.FIT_START:
            self.ema_model = ShadowModel(state.model)
            self.training_model = ShadowModel(state.model)
        elif event == Event.BATCH_END:
            compute_ema(state.model, self.ema_model, self.smoothing)
        elif event in (Event.EVAL_START, Event.EVAL_END):
            self.swap(state.model, self.ema_model)

    def swap(self, model, shadow):
        for parameter, average in zip(model.parameters(), shadow.parameters()):
            parameter.data, average.data = average.data, parameter.data


class State:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.batch = None


class Engine:
    def __init__(self, state, algorithms):
        self.state, self.algorithms = state, algorithms

    def run_event(self, event):
        for algorithm in self.algorithms:
            if algorithm.match(event):
                algorithm.apply(event, self.state)


class Trainer:
    def __init__(self, model, optimizer, algorithms):
        self.state = State(model, optimizer)
        self.engine = Engine(self.state, algorithms)

    def fit(self, batches, evaluation, steps):
        self.engine.run_event(Event.FIT_START)
        for step, batch in enumerate(itertools.islice(batches, steps), 1):
            self.state.batch = [x.cuda() for x in batch]
            self._train_batch()
            self.engine.run_event(Event.BATCH_END)
            if step % 4 == 0:
                self._eval(evaluation)

    def _train_batch(self):
        x, y = self.state.batch
        loss = F.cross_entropy(self.state.model(x), y)
        self.state.optimizer.zero_grad()
        loss.backward()
        self.state.optimizer.step()

    @torch.no_grad()
    def _eval(self, evaluation):
        self.engine.run_event(Event.EVAL_START)
        for x, y in evaluation:
            F.cross_entropy(self.state.model(x.cuda()), y.cuda()).item()
        self.engine.run_event(Event.EVAL_END)


def batches(size=64):
    while True:
        yield torch.randn(size, 1024), torch.randint(0, 100, (size,))


def main():
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(4096, 100)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, optimizer, [EMA()])
    trainer.fit(batches(), list(itertools.islice(batches(), 2)), steps=8)


if __name__ == "__main__":
    main()
