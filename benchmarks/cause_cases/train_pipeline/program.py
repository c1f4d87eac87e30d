import torch
from torch import nn


class Pipeline:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.cur_batch = None

    def progress(self, batches):
        self.cur_batch = next(batches).cuda()
        self.optimizer.zero_grad()
        pooled = self.model[0](self.cur_batch.float().mean(1))
        loss = self.model[1](pooled).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def loader():
    for _ in range(4):
        yield torch.randint(0, 255, (4096, 16, 256), dtype=torch.int32)


model = nn.ModuleList([nn.Linear(256, 8192), nn.Linear(8192, 64)]).cuda()
pipeline = Pipeline(model, torch.optim.SGD(model.parameters(), lr=1e-3))
batches = loader()
for _ in range(4):
    loss = pipeline.progress(batches)
print(loss)
