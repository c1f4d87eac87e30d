"""Segmentation of scans, with the Dice loss."""

import torch
from torch import nn


def _one_hot(x, classes, axis=1):
    "Target mask to one hot"
    return torch.stack([torch.where(x == c, 1, 0) for c in range(classes)], axis=axis)


class DiceLoss:
    def __init__(self, axis=1, smooth=1e-6):
        self.axis, self.smooth = axis, smooth

    def __call__(self, pred, targ):
        targ = _one_hot(targ, pred.shape[self.axis])
        pred = pred.softmax(dim=self.axis)
        sum_dims = list(range(2, len(pred.shape)))
        inter = torch.sum(pred * targ, dim=sum_dims)
        union = torch.sum(pred + targ, dim=sum_dims)
        return (1 - (2.0 * inter + self.smooth) / (union + self.smooth)).mean()


def unet(classes, width=12):
    return nn.Sequential(
        nn.Conv3d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(width, classes, 1),
    )


class Learner:
    def __init__(self, model, loss_func, lr=1e-3):
        self.model, self.loss_func = model, loss_func
        self.opt = torch.optim.Adam(model.parameters(), lr)

    def one_batch(self, xb, yb):
        loss = self.loss_func(self.model(xb), yb)
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.item()

    def fit(self, batches):
        return [self.one_batch(*batch) for batch in batches]


def scans(count, classes, size=32):
    for _ in range(count):
        labels = torch.randint(0, classes, (2, size, size, size)).cuda()
        yield torch.rand(2, 1, size, size, size).cuda(), labels


if __name__ == "__main__":
    torch.manual_seed(0)
    print(Learner(unet(24).cuda(), DiceLoss()).fit(scans(4, 24)))
