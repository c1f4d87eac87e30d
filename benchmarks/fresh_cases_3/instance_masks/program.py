from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Instances:
    boxes: torch.Tensor
    scores: torch.Tensor
    classes: torch.Tensor
    masks: torch.Tensor

    def to(self, device):
        return Instances(*(value.to(device) for value in vars(self).values()))


class ConvBlock(nn.Sequential):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Segmenter(nn.Module):
    """Prototype masks of the whole image, and coefficients of them for each query."""

    def __init__(self, width=32, prototypes=32, queries=100, classes=20):
        super().__init__()
        self.backbone = nn.Sequential(
            ConvBlock(3, width, 2), ConvBlock(width, 2 * width, 2), ConvBlock(2 * width, 2 * width)
        )
        self.proto = nn.Conv2d(2 * width, prototypes, 1)
        self.queries = nn.Parameter(torch.randn(queries, 2 * width))
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.coefficients = nn.Linear(2 * width, prototypes)
        self.classifier = nn.Linear(2 * width, classes)
        self.box = nn.Linear(2 * width, 4)

    def forward(self, images):
        features = self.backbone(images)
        proto = self.proto(features)
        memory = F.adaptive_avg_pool2d(features, 16).flatten(2).transpose(1, 2)
        queries = self.queries.expand(len(images), -1, -1)
        queries, _ = self.attention(queries, memory, memory, need_weights=False)
        masks = torch.einsum("nqp,nphw->nqhw", self.coefficients(queries), proto)
        return self.classifier(queries), self.box(queries).sigmoid(), masks


class Predictor:
    def __init__(self, model, size=512, keep=90):
        self.model = model.cuda().eval()
        self.size = size
        self.keep = keep

    def preprocess(self, image):
        x = image.cuda(non_blocking=True).float().div_(255)
        return F.interpolate(x[None], size=(self.size, self.size), mode="bilinear")

    def postprocess(self, logits, boxes, masks, shape):
        scores, classes = logits.softmax(-1).max(-1)
        scores, order = scores.topk(self.keep)
        masks, boxes, classes = masks[order], boxes[order], classes[order]
        masks = F.interpolate(masks[None], size=shape, mode="bilinear", align_corners=False)[0]
        masks = masks.sigmoid() > 0.5
        scale = torch.tensor([shape[1], shape[0]] * 2, device=boxes.device)
        return Instances(boxes * scale, scores, classes, masks)

    @torch.no_grad()
    def __call__(self, image):
        logits, boxes, masks = self.model(self.preprocess(image))
        return self.postprocess(logits[0], boxes[0], masks[0], image.shape[-2:])


def street_images(count, height=768, width=1024):
    for _ in range(count):
        yield torch.randint(0, 256, (3, height, width), dtype=torch.uint8)


def main():
    torch.manual_seed(0)
    predictor = Predictor(Segmenter())
    for name, image in enumerate(street_images(3)):
        instances = predictor(image).to("cpu")
        print(name, len(instances.scores), tuple(instances.masks.shape))


if __name__ == "__main__":
    main()
