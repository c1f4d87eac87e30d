"""Which pixels of an X-ray speak for a finding: gradients along a path from a blank image."""

import argparse

import torch
from torch import nn


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
    )


class ChestNet(nn.Module):
    def __init__(self, findings=14):
        super().__init__()
        self.body = nn.Sequential(block(1, 32), block(32, 64), block(64, 128))
        self.head = nn.Linear(128, findings)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3)))


class PathGradients:
    """The mean of the gradients on the way from a baseline to the image, times the difference."""

    def __init__(self, model, steps):
        self.model, self.steps = model, steps

    def attribute(self, image, finding, baseline=None):
        baseline = torch.zeros_like(image) if baseline is None else baseline
        alphas = torch.linspace(0, 1, self.steps, device=image.device).view(-1, 1, 1, 1)
        path = (baseline + alphas * (image - baseline)).requires_grad_()
        score = self.model(path)[:, finding].sum()
        (gradients,) = torch.autograd.grad(score, path)
        return gradients.mean(0, keepdim=True) * (image - baseline)


def strongest(attribution, count=5):
    values, places = attribution.abs().flatten().topk(count)
    width = attribution.shape[-1]
    return [
        (int(place) // width, int(place) % width, float(value))
        for place, value in zip(places, values)
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--images", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = ChestNet().cuda().eval().requires_grad_(False)
    explainer = PathGradients(model, args.steps)
    for number in range(args.images):
        image = torch.rand(1, 1, args.size, args.size).cuda()
        with torch.no_grad():
            finding = int(model(image).argmax())
        print(number, finding, strongest(explainer.attribute(image, finding)))


if __name__ == "__main__":
    main()
