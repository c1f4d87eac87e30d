import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.05)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def step(model, batch):
    x = torch.randn(batch, 1024, device="cuda")
    loss = model(x).square().mean()
    loss.backward()
    model.zero_grad()
    return loss.item()


def fit_batch(model, batch):
    try:
        return step(model, batch)
    except torch.OutOfMemoryError:
        if batch <= 1024:
            raise
        torch.cuda.empty_cache()
        print("batch", batch, "does not fit, trying", batch // 2)
        return fit_batch(model, batch // 2)


model = Net().cuda()
print(fit_batch(model, 16384))
