"""Random images, mixed."""

import torch


def create_loader(size, classes, batch_size, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        images = torch.rand(batch_size, 3, size, size, generator=generator)
        yield images, torch.randint(classes, (batch_size,), generator=generator)


class Mixup:
    def __init__(self, alpha, num_classes, label_smoothing=0.1):
        self.alpha = alpha
        self.num_classes = num_classes
        self.label_smoothing = label_smoothing

    def one_hot(self, target):
        off = self.label_smoothing / self.num_classes
        on = 1.0 - self.label_smoothing + off
        full = torch.full((len(target), self.num_classes), off, device=target.device)
        return full.scatter_(1, target[:, None], on)

    def __call__(self, x, target):
        lam = 1.0 - self.alpha / 2
        x.mul_(lam).add_(x.flip(0) * (1.0 - lam))
        return x, self.one_hot(target) * lam + self.one_hot(target.flip(0)) * (1.0 - lam)
