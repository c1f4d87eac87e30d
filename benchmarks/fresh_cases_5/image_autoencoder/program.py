import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width, latent):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            nn.ReLU(),
        )
        self.mean, self.scale = nn.Conv2d(2 * width, latent, 1), nn.Conv2d(2 * width, latent, 1)

    def forward(self, x):
        x = self.net(x)
        return self.mean(x), self.scale(x)


class VAE(nn.Module):
    def __init__(self, width=64, latent=16):
        super().__init__()
        self.encoder = Encoder(width, latent)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(latent, 2 * width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 3, 3, padding=1),
        )

    def forward(self, x):
        mean, log_variance = self.encoder(x)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def loss_of(model, images):
    output, mean, log_variance = model(images)
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).mean()
    return F.mse_loss(output, images) + 1e-3 * divergence


def main():
    torch.manual_seed(0)
    model = VAE().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []
    for _ in range(6):
        loss = loss_of(model, torch.rand(16, 3, 128, 128).cuda())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    print(history)


if __name__ == "__main__":
    main()
