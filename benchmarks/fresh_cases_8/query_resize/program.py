"""Validation of a mask transformer: instances at the size of the original images."""

import torch
import torch.nn.functional as F
from torch import nn


class MaskTransformer(nn.Module):
    def __init__(self, queries=80, width=64, classes=20):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 8, stride=8), nn.GELU(), nn.Conv2d(width, width, 1)
        )
        self.q = nn.Embedding(queries, width)
        self.class_head = nn.Linear(width, classes + 1)
        self.mask_head = nn.Linear(width, width)

    def forward(self, images):
        features = self.backbone(images)
        pooled = self.q.weight + features.mean((2, 3)).unsqueeze(1)
        masks = torch.einsum("bqc,bchw->bqhw", self.mask_head(pooled), features)
        return masks, self.class_head(pooled)


def to_instances(mask_logits, class_logits):
    masks = mask_logits > 0
    scores = class_logits.softmax(-1)[..., :-1]
    best, labels = scores.max(-1)
    quality = (mask_logits.sigmoid() * masks).sum((1, 2)) / masks.sum((1, 2)).clamp(min=1)
    return masks, labels, best * quality


class EoMT:
    def __init__(self, model, size=128):
        self.model, self.size = model, size
        self.found, self.labels = torch.zeros(()), []

    @torch.no_grad()
    def validation_step(self, images):
        resized = F.interpolate(images, (self.size, self.size))
        mask_logits, class_logits = self.model(resized)
        for masks, classes, image in zip(mask_logits, class_logits, images, strict=True):
            masks = F.interpolate(masks[None], image.shape[1:], mode="bilinear")[0]
            masks, labels, scores = to_instances(masks, classes)
            kept = scores.topk(5).indices
            self.found += masks[kept].any(0).float().mean().cpu()
            self.labels.append(labels[kept].tolist())
        return self.found

    def validate(self, sizes):
        self.model.eval()
        for height, width in sizes:
            self.validation_step(torch.rand(2, 3, height, width).cuda())
        return self.found.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    print(EoMT(MaskTransformer().cuda()).validate([(480, 640), (512, 512), (640, 800)]))
