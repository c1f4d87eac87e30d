"""What is minimised."""

import torch
from torch.nn import functional as F


def loss_function(recon_x, x, mu, logvar, beta=1.0):
    x = x.view(len(x), -1)
    if len(recon_x) != len(x):
        x = x.repeat_interleave(len(recon_x) // len(x), dim=0)
    bce = F.binary_cross_entropy_with_logits(recon_x, x, reduction="sum")
    # see Appendix B from VAE paper: 0.5 * sum(1 + log(sigma^2) - mu^2 - sigma^2)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + beta * kld
