"""The loss on texts that were held back."""

import torch
import torch.nn.functional as F


def perplexity(model, batches, device):
    model.eval()
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for tokens in batches:
            tokens = tokens.to(device)
            logits = model(tokens[:, :-1])
            total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    model.train()
    return torch.exp(total / len(batches)).item()
