import gc

import torch
from torch import nn

gc.disable()


class Awaitable:
    def __init__(self, table, ids):
        self.rows = table(ids)
        self.callbacks = [self.finish]

    def finish(self):
        return self.rows.view(-1, 64, self.rows.shape[-1]).mean(1)

    def wait(self):
        for callback in self.callbacks:
            result = callback()
        return result


table = nn.Embedding(100_000, 128).cuda()
head = nn.Linear(128, 2).cuda()
with torch.no_grad():
    for request in range(12):
        ids = torch.randint(0, 100_000, (512 * 64,), device="cuda")
        click = head(Awaitable(table, ids).wait()).softmax(1)
print(click[0].tolist())
