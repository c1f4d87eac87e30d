"""An encoder, a decoder, and what is drawn between."""

import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self, pixels, hidden, latent, num_samples=1):
        super().__init__()
        self.pixels = pixels
        self.num_samples = num_samples
        self.fc1 = nn.Linear(pixels, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, pixels)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return self.fc4(h3)

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, self.pixels))
        mu = mu.repeat_interleave(self.num_samples, dim=0)
        logvar = logvar.repeat_interleave(self.num_samples, dim=0)
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar
