import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class HedgedNet(nn.Module):
    """A classifier at each depth; their votes are weighted as the stream goes on."""

    def __init__(self, features, width, depth, classes, beta=0.99, lr=0.01):
        super().__init__()
        sizes = [features] + [width] * depth
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))
        self.heads = nn.ModuleList(nn.Linear(width, classes) for _ in range(depth))
        self.beta, self.lr = beta, lr
        self.register_buffer("alpha", torch.full((depth,), 1.0 / depth))

    def forward(self, x):
        outputs = []
        for layer, head in zip(self.hidden, self.heads):
            x = torch.relu(layer(x))
            outputs.append(head(x))
        return torch.stack(outputs)

    def partial_fit(self, x, y):
        losses = torch.stack([F.cross_entropy(output, y) for output in self(x)])
        for weight, loss in zip(self.alpha.tolist(), losses):
            (weight * loss).backward(retain_graph=True)
        self.update(losses)
        return losses[-1].item()

    def update(self, losses):
        for parameter in self.parameters():
            parameter.data -= self.lr * parameter.grad
            parameter.grad = None
        alpha = self.alpha * self.beta**losses
        alpha = alpha.clamp(min=0.01)
        self.alpha = alpha / alpha.sum()

    @torch.no_grad()
    def predict(self, x):
        return (self.alpha[:, None, None] * self(x).softmax(-1)).sum(0).argmax(-1)


def stream(batches, batch_size, features, classes):
    x = torch.randn(batches * batch_size, features)
    y = torch.randint(0, classes, (batches * batch_size,))
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def evaluate(model, loader):
    right = 0
    for x, y in loader:
        right += (model.predict(x.cuda()).cpu() == y).sum().item()
    return right


torch.manual_seed(0)
model = HedgedNet(features=128, width=1024, depth=4, classes=10).cuda()
for i, (x, y) in enumerate(stream(16, 1024, 128, 10)):
    loss = model.partial_fit(x.cuda(), y.cuda())
    if i % 8 == 0:
        print(i, loss)
print("right:", evaluate(model, stream(2, 1024, 128, 10)))
