import torch
from torch import nn
from torch.func import functional_call, grad, vmap

model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10)).cuda()
params = {k: v.detach() for k, v in model.named_parameters()}


def loss(params, x, y):
    logits = functional_call(model, params, (x[None],))
    return nn.functional.cross_entropy(logits, y[None])


def squared_norm(params, x, y):
    return sum(g.pow(2).sum() for g in grad(loss)(params, x, y).values())


norms = vmap(squared_norm, in_dims=(None, 0, 0))
x = torch.randn(256, 256, device="cuda")
y = torch.randint(0, 10, (256,), device="cuda")
print(norms(params, x, y).mean().item())
