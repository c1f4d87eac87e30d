"""The box loss of matched queries of a detection transformer."""

import torch
from torch import nn


def box_area(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def box_cxcywh_to_xyxy(x):
    cx, cy, w, h = x.unbind(-1)
    return torch.stack([cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h], dim=-1)


def box_iou(boxes1, boxes2):
    area1, area2 = box_area(boxes1), box_area(boxes2)
    lt = torch.max(boxes1[:, None, :2], boxes2[:, :2])
    rb = torch.min(boxes1[:, None, 2:], boxes2[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    union = area1[:, None] + area2 - inter
    return inter / (union + 1e-7), union


class SetCriterion(nn.Module):
    def loss_boxes(self, src_boxes, target_boxes):
        loss_l1 = (src_boxes - target_boxes).abs().sum() / len(target_boxes)
        iou, _ = box_iou(box_cxcywh_to_xyxy(src_boxes), box_cxcywh_to_xyxy(target_boxes))
        loss_iou = 1 - torch.diag(iou)
        return loss_l1 + loss_iou.sum() / len(target_boxes)

    def forward(self, layers, targets):
        return sum(self.loss_boxes(boxes.flatten(0, 1), targets) for boxes in layers)


class Decoder(nn.Module):
    def __init__(self, width=96, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.bbox = nn.Linear(width, 4)

    def forward(self, queries):
        outputs = []
        for layer in self.layers:
            queries = queries + layer(queries).relu()
            outputs.append(self.bbox(queries).sigmoid())
        return outputs


def train(model, criterion, steps, images, matched):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        queries = torch.randn(images, matched, 96).cuda()
        targets = torch.rand(images * matched, 4).cuda()
        loss = criterion(model(queries), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    torch.manual_seed(0)
    train(Decoder().cuda(), SetCriterion(), steps=4, images=8, matched=150)
