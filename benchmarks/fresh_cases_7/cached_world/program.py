"""A dialogue agent in a world: trained, then loaded again for the final validation."""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn


class Agent:
    def __init__(self, opt, state=None):
        self.opt = opt
        self.model = nn.Sequential(
            nn.Embedding(opt["vocabulary"], opt["width"]),
            nn.Linear(opt["width"], 4 * opt["width"]),
            nn.ReLU(),
            nn.Linear(4 * opt["width"], opt["width"]),
            nn.Linear(opt["width"], opt["vocabulary"]),
        ).cuda()
        if state is not None:
            self.model.load_state_dict(state)
        if opt["train"]:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def act(self, tokens):
        if not self.opt["train"]:
            with torch.no_grad():
                return F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten()).item()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.item()


class World:
    def __init__(self, agent, examples):
        self.agent = agent
        self.examples = examples

    @lru_cache(maxsize=1)
    def num_examples(self):
        return len(self.examples)

    def parley(self, index):
        return self.agent.act(self.examples[index].cuda())


class WorldWrapper:
    def __init__(self, world):
        self.world = world

    @lru_cache(maxsize=1)
    def num_examples(self):
        return self.world.num_examples()

    def run(self):
        losses = [self.world.parley(i) for i in range(self.num_examples())]
        return sum(losses) / len(losses)


def train_model(opt):
    data = [torch.randint(0, opt["vocabulary"], (2, 16)) for _ in range(6)]
    world = WorldWrapper(World(Agent({**opt, "train": True}), data))
    print("train", world.run())
    return {k: v.cpu() for k, v in world.world.agent.model.state_dict().items()}


def validate(opt, state):
    world = World(Agent({**opt, "train": False}, state), [torch.zeros(2, 16, dtype=torch.long)] * 3)
    return sum(world.parley(i) for i in range(3)) / 3


if __name__ == "__main__":
    torch.manual_seed(0)
    opt = {"vocabulary": 6000, "width": 512}
    weights = train_model(opt)
    print("valid", validate(opt, weights))
    print("large", validate({"vocabulary": 12000, "width": 1024}, None))
