import torch
import torch.nn.functional as F
from torch import nn


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: the gradient at the worst point near the weights."""

    def __init__(self, params, base_optimizer, rho=0.05, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = self.grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p].pop("old_p")
        self.base_optimizer.step()
        self.zero_grad()

    def grad_norm(self):
        norms = [
            p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        return torch.stack(norms).norm()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


class WideNet(nn.Module):
    def __init__(self, width=512, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(4)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Accuracy:
    def __init__(self):
        self.right = self.count = 0

    def update(self, logits, labels):
        self.right += (logits.argmax(1) == labels).sum().item()
        self.count += len(labels)


def run(epochs=2):
    data = torch.utils.data.TensorDataset(torch.randn(160, 3, 32, 32), torch.randint(0, 10, (160,)))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    model = WideNet().cuda()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        accuracy = Accuracy()
        for images, labels in loader:
            images, labels = images.cuda(), labels.cuda()
            logits = model(images)
            F.cross_entropy(logits, labels).backward()
            accuracy.update(logits.detach(), labels)
            optimizer.first_step()
            F.cross_entropy(model(images), labels).backward()
            optimizer.second_step()
        print(epoch, accuracy.right / accuracy.count)


if __name__ == "__main__":
    torch.manual_seed(0)
    run()
