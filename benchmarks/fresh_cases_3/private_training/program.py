import torch
import torch.nn.functional as F
from torch import nn


class GradSampleModule(nn.Module):
    """Gradients of each sample: layers' inputs are kept by hooks until the backward pass."""

    def __init__(self, module):
        super().__init__()
        self._module = module
        self.hooks_enabled = True
        for layer in self.supported():
            layer.activations = []
            layer.register_forward_hook(self.capture_activations)
            layer.register_full_backward_hook(self.capture_backprops)

    def supported(self):
        return [m for m in self._module.modules() if isinstance(m, nn.Linear)]

    def forward(self, *args):
        return self._module(*args)

    def capture_activations(self, layer, inputs, output):
        if not self.training or not self.hooks_enabled:
            return
        layer.activations.append(inputs[0].detach())

    def capture_backprops(self, layer, _, grad_outputs):
        if not self.hooks_enabled:
            return
        activations = layer.activations.pop()
        backprops = grad_outputs[0] * len(activations)
        sample = torch.einsum("n...i,n...j->nij", backprops, activations)
        layer.weight.grad_sample = sample
        if layer.bias is not None:
            layer.bias.grad_sample = torch.einsum("n...i->ni", backprops)


class PrivateSGD:
    def __init__(self, model, lr=0.05, max_grad_norm=1.0, noise=0.5):
        self.params = [p for layer in model.supported() for p in layer.parameters()]
        self.lr, self.max_grad_norm, self.noise = lr, max_grad_norm, noise

    def zero_grad(self):
        for p in self.params:
            p.grad = None
            p.grad_sample = None

    @torch.no_grad()
    def step(self):
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in self.params])
        factor = (self.max_grad_norm / (norms.norm(dim=0) + 1e-6)).clamp(max=1.0)
        for p in self.params:
            summed = torch.einsum("n,n...->...", factor, p.grad_sample)
            noise = torch.randn_like(summed) * self.noise * self.max_grad_norm
            p.sub_((summed + noise) / len(factor), alpha=self.lr)


class TextClassifier(nn.Module):
    def __init__(self, features=64, width=256, classes=8):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


def batches(count, size, length=64, features=64):
    for _ in range(count):
        yield torch.randn(size, length, features), torch.randint(0, 8, (size,))


def evaluate(model):
    total = correct = 0
    with torch.no_grad():
        for x, y in batches(8, 128):
            x, y = x.cuda(), y.cuda()
            predicted = model(x).argmax(dim=1)
            correct += (predicted == y).sum().item()
            total += len(y)
    return correct / total


def train(model, optimizer, epoch):
    model.train()
    for x, y in batches(6, 64):
        x, y = x.cuda(), y.cuda()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {evaluate(model):.3f}")


def main():
    torch.manual_seed(0)
    model = GradSampleModule(TextClassifier()).cuda()
    optimizer = PrivateSGD(model)
    for epoch in range(3):
        train(model, optimizer, epoch)


if __name__ == "__main__":
    main()
