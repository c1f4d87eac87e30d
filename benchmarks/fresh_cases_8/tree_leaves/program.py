"""Predictions of a network with nested inputs and outputs, in a loop without the collector."""

import gc

import torch
from torch import nn


def flatten(structure, is_leaf=None):
    """The leaves of dictionaries and lists, in order."""
    leaves = []

    def helper(node):
        if is_leaf is not None and is_leaf(node):
            leaves.append(node)
        elif isinstance(node, dict):
            for key in sorted(node):
                helper(node[key])
        elif isinstance(node, (list, tuple)):
            for child in node:
                helper(child)
        else:
            leaves.append(node)

    helper(structure)
    return leaves


def map_structure(function, structure):
    if isinstance(structure, dict):
        return {key: map_structure(function, value) for key, value in structure.items()}
    return function(structure)


def assert_same_batch(structure):
    sizes = {len(leaf) for leaf in flatten(structure, lambda node: torch.is_tensor(node))}
    if len(sizes) != 1:
        raise ValueError(f"batches of {sizes}")


class TwoTower(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.image = nn.Conv2d(3, width, 3, padding=1)
        self.depth = nn.Conv2d(1, width, 3, padding=1)
        self.head = nn.Conv2d(2 * width, 8, 1)

    def forward(self, inputs):
        image, depth = self.image(inputs["image"]).relu(), self.depth(inputs["depth"]).relu()
        features = torch.cat([image, depth], 1)
        return {"features": {"image": image, "depth": depth}, "logits": self.head(features)}


class Predictor:
    def __init__(self, model, device):
        self.model = model.to(device).eval()
        self.device = device

    @torch.inference_mode()
    def predict_on_batch(self, inputs):
        inputs = map_structure(lambda leaf: leaf.to(self.device), inputs)
        outputs = self.model(inputs)
        assert_same_batch(outputs)
        return outputs["logits"].argmax(1).cpu()


def main(steps=8, size=8):
    torch.manual_seed(0)
    predictor = Predictor(TwoTower(), "cuda")
    gc.disable()
    for step in range(steps):
        inputs = {"image": torch.rand(size, 3, 80, 80), "depth": torch.rand(size, 1, 80, 80)}
        print(step, tuple(predictor.predict_on_batch(inputs).shape))


main()
