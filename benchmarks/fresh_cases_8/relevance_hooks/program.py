"""Layer-wise relevance of images: hooks are registered for each composite, and removed again."""

import torch
from torch import nn


class EpsilonHook:
    def __init__(self, epsilon=1e-6):
        self.epsilon = epsilon
        self.stored_tensors = {}
        self.handles = []

    def forward(self, module, inputs, output):
        self.stored_tensors["input"] = inputs[0]
        self.stored_tensors["output"] = output
        output.register_hook(self.backward)

    def backward(self, grad_output):
        output = self.stored_tensors["output"]
        return grad_output * output / (output + self.epsilon * output.sign())

    def register(self, module):
        self.handles.append(module.register_forward_hook(self.forward))

    def remove(self):
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class Composite:
    def __init__(self, types=(nn.Conv2d, nn.Linear)):
        self.types = types
        self.hooks = []

    def __enter__(self):
        for module in self.model.modules():
            if isinstance(module, self.types):
                hook = EpsilonHook()
                hook.register(module)
                self.hooks.append(hook)
        return self.model

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def context(self, model):
        self.model = model
        return self


def vgg(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 100),
    )


def main():
    torch.manual_seed(0)
    model = vgg().cuda().eval()
    target = torch.eye(100, device="cuda")[[3, 7]]
    for index in range(6):
        data = torch.randn(2, 3, 128, 128, device="cuda", requires_grad=True)
        with Composite().context(model) as modified:
            modified(data).backward(gradient=target)
        relevance = (data * data.grad).sum(1).cpu()
        print(index, tuple(relevance.shape))


main()
