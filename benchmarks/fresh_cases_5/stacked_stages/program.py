from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class StageArguments:
    name: str
    lr: float
    steps: int
    width: int = 1024


class Decoder(nn.Module):
    def __init__(self, width, depth=4, vocabulary=2000):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Checkpoints:
    def __init__(self):
        self.saved = {}

    def save(self, name, model):
        self.saved[name] = {key: value.cpu() for key, value in model.state_dict().items()}

    def load(self, name, model):
        if name in self.saved:
            model.load_state_dict(self.saved[name])
        return model


class Finetuner:
    def __init__(self, checkpoints):
        self.checkpoints = checkpoints
        self.model = None

    def build(self, arguments, previous):
        model = Decoder(arguments.width)
        return self.checkpoints.load(previous, model).cuda()

    def tune(self, arguments):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=arguments.lr)
        for _ in range(arguments.steps):
            ids = torch.randint(0, 2000, (4, 65)).cuda()
            logits = self.model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def run(self, stages):
        previous = ""
        for arguments in stages:
            model = self.build(arguments, previous)
            self.model = model
            print(arguments.name, self.tune(arguments))
            self.checkpoints.save(arguments.name, model)
            self.model.zero_grad()
            self.evaluate(model)
            previous = arguments.name

    @torch.no_grad()
    def evaluate(self, model):
        ids = torch.randint(0, 2000, (2, 64)).cuda()
        print(model(ids).argmax(-1).float().mean().item())


class Reward:
    """Scores the samples of the last stage with a model of its own."""

    def __init__(self, width=1024):
        self.model = Decoder(width, depth=12).cuda().eval()

    @torch.no_grad()
    def score(self, samples):
        return self.model(samples.cuda()).mean().item()


def main():
    torch.manual_seed(0)
    first = StageArguments("supervised", lr=1e-2, steps=3)
    tuner = Finetuner(Checkpoints())
    tuner.run([first, replace(first, name="domain", lr=1e-3)])
    reward = Reward()
    print(reward.score(torch.randint(0, 2000, (4, 64))))


if __name__ == "__main__":
    main()
