"""How much noise there is at each time."""

import torch


class Schedule:
    def __init__(self, steps, device):
        betas = torch.linspace(1e-4, 0.02, steps, device=device)
        self.steps = steps
        self.kept = torch.cumprod(1 - betas, dim=0)
        self.betas = betas

    def add_noise(self, images, noise, t):
        kept = self.kept[t][:, None, None, None]
        return kept.sqrt() * images + (1 - kept).sqrt() * noise

    def previous(self, x, predicted, t):
        kept, beta = self.kept[t], self.betas[t]
        mean = (x - beta / (1 - kept).sqrt() * predicted) / (1 - beta).sqrt()
        if t == 0:
            return mean
        return mean + beta.sqrt() * torch.randn_like(x)
