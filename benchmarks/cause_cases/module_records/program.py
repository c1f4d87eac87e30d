import torch
from torch import nn

model = nn.Sequential(
    nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 4)
).cuda()
model.requires_grad_(False)


def record(module, inputs, output):
    module.input = inputs[0].detach().clone()
    module.output = output.detach().clone()


def attribute(x, baseline):
    handles = [layer.register_forward_hook(record) for layer in model]
    both = torch.cat([x, baseline]).requires_grad_()
    model(both)[:, 0].sum().backward()
    contributions = both.grad[: len(x)] * (x - baseline)
    for handle in handles:
        handle.remove()
    return contributions.cpu()


x = torch.randn(1024, 512, device="cuda")
scores = attribute(x, torch.zeros_like(x))
predictions = []
with torch.no_grad():
    for part in range(4):
        batch = torch.randn(16384, 512, device="cuda")
        predictions.append(model(batch).cpu())
print(scores.shape, len(predictions))
