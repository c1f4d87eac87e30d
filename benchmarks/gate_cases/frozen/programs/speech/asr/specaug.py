"""Masks over bands and over time."""

import torch


def mask_along_axis(spec, dim, num_mask, width):
    size = spec.shape[dim]
    spans = torch.arange(size, device=spec.device)
    for _ in range(num_mask):
        start = int(torch.randint(max(size - width, 1), (1,)))
        hidden = (spans >= start) & (spans < start + width)
        shape = [1] * spec.dim()
        shape[dim] = size
        spec.masked_fill_(hidden.view(shape), 0.0)
    return spec


class SpecAug:
    def __init__(self, num_freq_mask=2, num_time_mask=2):
        self.num_freq_mask = num_freq_mask
        self.num_time_mask = num_time_mask

    def __call__(self, x):
        x = mask_along_axis(x, 2, self.num_freq_mask, 10)
        return mask_along_axis(x, 1, self.num_time_mask, 20)
