"""What is printed during training."""

import torch


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name = name
        self.fmt = fmt
        self.sum = 0.0
        self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def __str__(self):
        return ("{}: {" + self.fmt + "}").format(self.name, self.sum / max(self.count, 1))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.eq(target[:, None])
        return [correct[:, :k].any(1).float().mean().item() * 100 for k in topk]
