"""Assign anchors to boxes in crowded images."""

import torch
from torch import nn


def bbox_overlaps(bboxes1, bboxes2):
    lt = torch.max(bboxes1[:, None, :2], bboxes2[None, :, :2])
    rb = torch.min(bboxes1[:, None, 2:], bboxes2[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    overlap = wh[..., 0] * wh[..., 1]
    area1 = (bboxes1[:, 2] - bboxes1[:, 0]) * (bboxes1[:, 3] - bboxes1[:, 1])
    area2 = (bboxes2[:, 2] - bboxes2[:, 0]) * (bboxes2[:, 3] - bboxes2[:, 1])
    return overlap / (area1[:, None] + area2 - overlap + 1e-6)


class MaxIoUAssigner:
    def __init__(self, pos_iou_thr=0.5):
        self.pos_iou_thr = pos_iou_thr

    def assign(self, bboxes, gt_bboxes):
        overlaps = bbox_overlaps(gt_bboxes, bboxes)
        max_overlaps, argmax = overlaps.max(dim=0)
        return torch.where(max_overlaps >= self.pos_iou_thr, argmax + 1, 0)


class Head(nn.Module):
    def __init__(self, anchors=9):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 8, stride=8)
        self.cls = nn.Conv2d(32, anchors, 1)

    def forward(self, x):
        return self.cls(self.conv(x).relu()).permute(0, 2, 3, 1).flatten(1)


def grid_anchors(size, stride=8, scales=9):
    ys, xs = torch.meshgrid(*[torch.arange(0, size, stride)] * 2, indexing="ij")
    centers = torch.stack([xs, ys], -1).reshape(-1, 1, 2).float().cuda()
    half = (torch.arange(1, scales + 1).float() * 6).view(1, -1, 1).cuda()
    return torch.cat([centers - half, centers + half], -1).reshape(-1, 4)


def crowded(size, count):
    corner = torch.rand(count, 2) * (size - 32)
    return torch.cat([corner, corner + 4 + torch.rand(count, 2) * 28], 1).cuda()


def main(size=320, images=2, crowd=500):
    torch.manual_seed(0)
    head = Head().cuda()
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-2)
    assigner = MaxIoUAssigner()
    anchors = grid_anchors(size)
    for step in range(4):
        scores = head(torch.rand(images, 3, size, size).cuda())
        targets = [assigner.assign(anchors, crowded(size, crowd)) for _ in range(images)]
        loss = nn.functional.binary_cross_entropy_with_logits(
            scores, (torch.stack(targets) > 0).float()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
