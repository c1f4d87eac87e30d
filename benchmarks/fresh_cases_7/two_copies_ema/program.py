"""An algorithm that keeps a moving average of the weights and swaps it in for evaluation."""

import copy
import itertools

import torch
from torch import nn


class Event:
    FIT_START, BATCH_END, EVAL_START, EVAL_END = range(4)


class EMA:
    def __init__(self, smoothing=0.99):
        self.smoothing = smoothing
        self.ema_model = None
        self.training_model = None

    def apply(self, event, state):
        if event == Event.FIT_START:
            self.ema_model = copy.deepcopy(state.model)
            self.training_model = copy.deepcopy(state.model)
        elif event == Event.BATCH_END:
            compute_ema(state.model, self.ema_model, self.smoothing)
        elif event == Event.EVAL_START:
            copy_weights(self.training_model, state.model)
            copy_weights(state.model, self.ema_model)
        elif event == Event.EVAL_END:
            copy_weights(state.model, self.training_model)


@torch.no_grad()
def compute_ema(model, ema_model, smoothing):
    for average, value in zip(ema_model.parameters(), model.parameters()):
        average.mul_(smoothing).add_(value, alpha=1 - smoothing)


@torch.no_grad()
def copy_weights(target, source):
    for a, b in zip(target.parameters(), source.parameters()):
        a.copy_(b)


class State:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Trainer:
    def __init__(self, model, algorithms):
        self.state = State(model)
        self.algorithms = algorithms

    def run_event(self, event):
        for algorithm in self.algorithms:
            algorithm.apply(event, self.state)

    def fit(self, epochs, batches):
        self.run_event(Event.FIT_START)
        for _ in range(epochs):
            for x, y in itertools.islice(data(), batches):
                self.state.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.state.model(x), y)
                loss.backward()
                self.state.optimizer.step()
                self.run_event(Event.BATCH_END)
            self.run_event(Event.EVAL_START)
            print(self.evaluate())
            self.run_event(Event.EVAL_END)

    @torch.no_grad()
    def evaluate(self):
        return sum((self.state.model(x).argmax(-1) == y).sum().item() for x, y in take(2))


def data():
    while True:
        yield torch.randn(64, 1024).cuda(), torch.randint(0, 10, (64,)).cuda()


def take(count):
    return itertools.islice(data(), count)


if __name__ == "__main__":
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(6)]
    Trainer(nn.Sequential(*layers, nn.Linear(1024, 10)).cuda(), [EMA()]).fit(2, 4)
