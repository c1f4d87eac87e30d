"""Pictures of what the model has learned."""

import torch


class Gallery:
    """A few images of each epoch, side by side with their reconstructions."""

    def __init__(self, count=8):
        self.count = count
        self.rows = []

    def add(self, data, recon_batch):
        n = min(len(data), self.count)
        recon = torch.sigmoid(recon_batch.view_as(data)[:n])
        self.rows.append(torch.cat([data[:n], recon]).cpu())

    def save(self):
        grid = torch.cat(self.rows)
        print("gallery", tuple(grid.shape))
