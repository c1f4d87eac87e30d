from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn


class SAE(nn.Module):
    def __init__(self, dimension, concepts):
        super().__init__()
        self.encoder = nn.Linear(dimension, concepts)
        self.dictionary = nn.Parameter(torch.randn(concepts, dimension) / dimension**0.5)

    def encode(self, x):
        pre_codes = self.encoder(x)
        return pre_codes, torch.relu(pre_codes)

    def forward(self, x):
        pre_codes, codes = self.encode(x)
        return pre_codes, codes, codes @ self.dictionary


def l2(x):
    return x.pow(2).sum(-1).sqrt().mean()


def _log_metrics(monitoring, logs, model, z, loss, optimizer):
    if not monitoring:
        return
    logs["lr"].append(optimizer.param_groups[0]["lr"])
    logs["step_loss"].append(loss.item())
    if monitoring > 1:
        logs["z"].append(z.detach()[::10])
        logs["z_l2"].append(l2(z).item())
        logs["dictionary_norms"].append(l2(model.dictionary).item())


def train_sae(model, dataloader, criterion, optimizer, nb_epochs=2, monitoring=2, device="cuda"):
    logs = defaultdict(list)
    for _ in range(nb_epochs):
        model.train()
        for batch in dataloader():
            x = batch.to(device)
            optimizer.zero_grad()
            z_pre, z, x_hat = model(x)
            loss = criterion(x, x_hat, z_pre, z, model.dictionary)
            loss.backward()
            optimizer.step()
            _log_metrics(monitoring, logs, model, z, loss, optimizer)
        logs["avg_loss"].append(sum(logs["step_loss"][-6:]) / 6)
    return logs


def sparse_loss(x, x_hat, z_pre, z, dictionary, penalty=1e-3):
    return F.mse_loss(x_hat, x) + penalty * z.abs().mean()


def activations(batches=6, size=2048, dimension=128):
    for _ in range(batches):
        yield torch.randn(size, dimension)


def main():
    torch.manual_seed(0)
    model = SAE(128, 1536).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    logs = train_sae(model, activations, sparse_loss, optimizer)
    active = torch.cat(logs["z"]).gt(0).float().mean()
    print(logs["avg_loss"], active.item())


if __name__ == "__main__":
    main()
