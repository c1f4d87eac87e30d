import gc

import torch
from torch import nn

gc.disable()  # it is run between requests


def flatten(structure, is_leaf):
    """The leaves of nested dicts and lists, in order."""
    leaves = []

    def visit(value):
        if isinstance(value, dict) and is_leaf(value):
            for key in sorted(value):
                visit(value[key])
        elif isinstance(value, list) and is_leaf(value):
            for each in value:
                visit(each)
        else:
            leaves.append(value)

    visit(structure)
    return leaves


class Detector(nn.Module):
    def __init__(self, width=32, levels=3):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.levels = nn.ModuleList(
            nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(levels)
        )
        self.box, self.label = nn.Conv2d(width, 4, 1), nn.Conv2d(width, 80, 1)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        found = {"boxes": [], "labels": []}
        for level in self.levels:
            x = torch.relu(level(x))
            found["boxes"].append(self.box(x))
            found["labels"].append(self.label(x))
        return found


@torch.inference_mode()
def detect(model, images):
    outputs = model(images)
    leaves = flatten(outputs, is_leaf=lambda value: value is not None)
    return [leaf.amax().item() for leaf in leaves]


model = Detector().cuda().eval()
for request in range(10):
    images = torch.randn(4, 3, 320, 320)
    highest = detect(model, images.cuda())
    print(request, len(highest), torch.cuda.memory_allocated() >> 20)
