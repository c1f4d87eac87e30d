import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Splats(nn.Module):
    """Points with a position, an opacity and the coefficients of a color that depends on view."""

    def __init__(self, count, harmonics=48):
        super().__init__()
        self.params = nn.ParameterDict(
            {
                "means": nn.Parameter(torch.randn(count, 3)),
                "opacities": nn.Parameter(torch.zeros(count)),
                "colors": nn.Parameter(torch.zeros(count, harmonics)),
            }
        )

    def forward(self, views):
        sigma = self.params["opacities"].sigmoid()
        weights = torch.exp(-(views @ self.params["means"].T).square()) * sigma
        return (weights / weights.sum(1, keepdim=True)) @ self.params["colors"]


def make_optimizers(params, lrs):
    return {
        name: torch.optim.Adam([params[name]], lr=lr, eps=1e-15, fused=True)
        for name, lr in lrs.items()
    }


@torch.no_grad()
def duplicate(params, optimizers, chosen):
    for name, optimizer in optimizers.items():
        param = params[name]
        state = optimizer.state.pop(param)
        new_param = nn.Parameter(torch.cat([param, param[chosen]]))
        new_state = {}
        for key in list(state):
            value = state.pop(key)
            if value.dim():
                value = torch.cat([value, value.new_zeros(len(chosen), *value.shape[1:])])
            new_state[key] = value
        optimizer.state[new_param] = new_state
        optimizer.param_groups[0]["params"] = [new_param]
        params[name] = new_param


def step(model, optimizers, views, colors):
    loss = F.l1_loss(model(views), colors)
    loss.backward()
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model, loader):
    error = 0.0
    for views, colors in loader:
        error += F.l1_loss(model(views.cuda()), colors.cuda()).item()
    return error / len(loader)


torch.manual_seed(0)
model = Splats(200_000).cuda()
optimizers = make_optimizers(model.params, {"means": 1e-3, "opacities": 0.05, "colors": 2.5e-3})
data = TensorDataset(torch.randn(16, 3), torch.rand(16, 48))
for epoch in range(3):
    for views, colors in DataLoader(data, batch_size=2, shuffle=True):
        loss = step(model, optimizers, views.cuda(), colors.cuda())
    count = len(model.params["means"])
    duplicate(model.params, optimizers, torch.arange(0, count, 4, device="cuda"))
    print(count, loss, evaluate(model, DataLoader(data, batch_size=2)))
