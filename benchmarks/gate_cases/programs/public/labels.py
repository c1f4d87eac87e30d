"""A loop that adds up its losses, as labelmodels' does."""

import torch
from torch import nn


class LabelModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.accuracy = nn.Parameter(torch.randn(64, 512))

    def forward(self, votes):
        return torch.logsumexp(votes @ self.accuracy, dim=1)

    def _do_estimate_label_model(self, batches):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        running_loss = 0.0
        for i, votes in enumerate(batches):
            optimizer.zero_grad()
            log_likelihood = self(votes)
            loss = -torch.mean(log_likelihood)
            loss += 0.1 * self.accuracy.square().sum()
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        return running_loss / len(batches)


def main():
    torch.manual_seed(0)
    model = LabelModel().to("cuda")
    batches = [torch.randn(512, 64, device="cuda") for _ in range(6)]
    print(model._do_estimate_label_model(batches))


if __name__ == "__main__":
    main()
