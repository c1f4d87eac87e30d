import logging

import torch
from torch import nn

logger = logging.getLogger("modeller")


class MessageBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(
            nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x, edges):
        source, target = edges
        messages = self.message(torch.cat([x[source], x[target]], -1))
        return x + self.norm(torch.zeros_like(x).index_add(0, target, messages))


class CrystalModel(nn.Module):
    def __init__(self, width=128, depth=4):
        super().__init__()
        self.atoms = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(MessageBlock(width) for _ in range(depth))
        self.energy = nn.Linear(width, 1)

    def forward(self, numbers, edges):
        x = self.atoms(numbers)
        for block in self.blocks:
            x = block(x, edges)
        return self.energy(x).sum()


class Crystals:
    def __init__(self, count, atoms=48, neighbours=12):
        self.count, self.atoms, self.neighbours = count, atoms, neighbours

    def batches(self, size):
        for _ in range(self.count // size):
            nodes = size * self.atoms
            edges = torch.randint(0, nodes, (2, nodes * self.neighbours))
            yield torch.randint(1, 100, (nodes,)), edges


class Modeller:
    def __init__(self, model, budget):
        self.model = model.cuda()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.budget = budget
        self.failures = []

    def epoch(self, data, batch_size):
        for numbers, edges in data.batches(batch_size):
            self.step(numbers.cuda(), edges.cuda())

    def step(self, numbers, edges):
        before = torch.cuda.memory_allocated()
        loss = self.model(numbers, edges)
        if torch.cuda.memory_allocated() - before > self.budget:
            raise RuntimeError(f"CUDA out of memory. Batch of {len(numbers)} atoms")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self, data, batch_size, epochs):
        done = 0
        while done < epochs:
            try:
                self.epoch(data, batch_size)
                done += 1
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                logger.warning("slashing the batch of %d", batch_size)
                self.failures.append((batch_size, error))
                batch_size //= 2
        return batch_size


def main():
    torch.manual_seed(0)
    modeller = Modeller(CrystalModel(), budget=48 << 20)
    size = modeller.train(Crystals(count=32), batch_size=16, epochs=2)
    print(size, [tried for tried, _ in modeller.failures])


if __name__ == "__main__":
    main()
