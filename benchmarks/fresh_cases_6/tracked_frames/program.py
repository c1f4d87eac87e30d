"""Follow people through a video: a detector finds them, a second network describes each one."""

import torch
import torch.nn.functional as F
from torch import nn


def stage(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Detector(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.stem = stage(3, width)
        self.down = nn.ModuleList(stage(width, width, 2) for _ in range(3))
        self.boxes = nn.Conv2d(width, 5, 1)

    def pyramid(self, image):
        levels = [self.stem(image)]
        for down in self.down:
            levels.append(down(levels[-1]))
        return levels

    def detect(self, levels, count):
        output = self.boxes(levels[-1])[0].flatten(1)
        best = output[0].topk(count).indices
        return output[1:, best].T.sigmoid()


class PersonEncoder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(
            stage(3, width), stage(width, width), stage(width, 2 * width, 2)
        )
        self.head = nn.Linear(2 * width, 128)

    def forward(self, crops):
        return F.normalize(self.head(self.layers(crops).mean((2, 3))), dim=-1)


def video(frames, size=384):
    for _ in range(frames):
        yield torch.rand(3, size, size)


def detections(detector, frames, people, device):
    """Yield a small picture of each person of each frame."""
    for frame in frames:
        image = frame.unsqueeze(0).to(device)
        levels = detector.pyramid(image)
        boxes = detector.detect(levels, people)
        grid = F.affine_grid(affine(boxes), (people, 3, 128, 64), align_corners=False)
        yield F.grid_sample(image.expand(people, -1, -1, -1), grid, align_corners=False)


def affine(boxes):
    x, y, width, height = (boxes * 2 - 1).unbind(1)
    zero = torch.zeros_like(x)
    rows = [torch.stack([width / 4, zero, x], 1), torch.stack([zero, height / 4, y], 1)]
    return torch.stack(rows, 1)


class Tracker:
    def __init__(self, encoder, threshold=0.5):
        self.encoder, self.threshold = encoder, threshold
        self.known = []

    def update(self, crops):
        described = self.encoder(crops).cpu()
        names = []
        for person in described:
            scores = [float(person @ other) for other in self.known]
            if scores and max(scores) > self.threshold:
                names.append(scores.index(max(scores)))
            else:
                self.known.append(person)
                names.append(len(self.known) - 1)
        return names


@torch.no_grad()
def main(frames=5, people=24, device="cuda"):
    torch.manual_seed(0)
    detector, encoder = Detector().to(device).eval(), PersonEncoder().to(device).eval()
    tracker = Tracker(encoder)
    for number, crops in enumerate(detections(detector, video(frames), people, device)):
        print(number, tracker.update(crops)[:5])


if __name__ == "__main__":
    main()
