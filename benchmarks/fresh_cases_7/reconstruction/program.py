"""Reconstruct images from features, one after the other, with one encoder."""

import torch
from torch import nn


class FeatureExtractor:
    def __init__(self, encoder, layers):
        self._encoder = encoder
        self._features = {}
        for name in layers:
            encoder.get_submodule(name).register_forward_hook(self._save(name))

    def _save(self, name):
        store = self._features.setdefault(name, [])

        def hook(module, inputs, output):
            store.append(output)

        return hook

    def run(self, x):
        for values in self._features.values():
            values.clear()
        self._encoder(x)
        return {name: values[-1] for name, values in self._features.items()}


def encoder(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
    )


def reconstruct(net, target, layers, steps=3):
    extractor = FeatureExtractor(net, layers)
    with torch.no_grad():
        goal = {k: v.clone() for k, v in extractor.run(target).items()}
    image = torch.zeros_like(target).requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.1)
    for _ in range(steps):
        features = extractor.run(image)
        loss = sum((features[k] - goal[k]).pow(2).mean() for k in layers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return image.detach().cpu()


def main(subjects=6):
    torch.manual_seed(0)
    net = encoder().cuda().requires_grad_(False)
    images = []
    for subject in range(subjects):
        target = torch.rand(4, 3, 96, 96).cuda()
        images.append(reconstruct(net, target, ["0", "2", "5"]))
    print(torch.stack(images).shape)


if __name__ == "__main__":
    main()
