import torch
import torch.nn.functional as F
from torch import nn


class Codebook(nn.Module):
    """Learnable directions, moved into the distribution of the inputs by a running affine map."""

    def __init__(self, dim, codes, decay=0.9):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(codes, dim))
        self.decay = decay
        self.register_buffer("batch_mean", torch.zeros(1, dim))
        self.register_buffer("batch_variance", torch.ones(1, dim))
        self.register_buffer("codebook_mean", torch.zeros(1, dim))
        self.register_buffer("codebook_variance", torch.ones(1, dim))

    def update_with_decay(self, name, value):
        old = getattr(self, name)
        self.register_buffer(name, old * self.decay + value * (1 - self.decay))

    def update_affine(self, data, codes):
        var, mean = torch.var_mean(codes, dim=0, keepdim=True, unbiased=False)
        self.update_with_decay("codebook_mean", mean)
        self.update_with_decay("codebook_variance", var)
        with torch.no_grad():
            var, mean = torch.var_mean(data, dim=0, keepdim=True, unbiased=False)
        self.update_with_decay("batch_mean", mean)
        self.update_with_decay("batch_variance", var)

    def forward(self, x):
        codes = F.normalize(self.embed, dim=-1)
        if self.training:
            self.update_affine(x, codes)
        with torch.no_grad():
            scale = (self.batch_variance / (self.codebook_variance + 1e-5)).sqrt()
            moved = (codes - self.codebook_mean) * scale + self.batch_mean
            index = torch.cdist(x, moved).argmin(dim=-1)
        return F.embedding(index, codes), index


class Tokenizer(nn.Module):
    def __init__(self, inner=768, dim=256, codes=16384):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inner, 512), nn.GELU(), nn.Linear(512, dim))
        self.codebook = Codebook(dim, codes)
        self.decoder = nn.Sequential(nn.Linear(dim, 512), nn.GELU(), nn.Linear(512, inner))

    def forward(self, x):
        z = self.encoder(x)
        quantized, index = self.codebook(z)
        commitment = F.mse_loss(z, quantized.detach()) + F.mse_loss(quantized, z.detach())
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized), index, commitment


class Embeddings(torch.utils.data.Dataset):
    def __init__(self, count, dim=768):
        self.values = torch.randn(count, dim)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, at):
        return self.values[at]


def train(model, loader, epochs):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for epoch in range(epochs):
        used = torch.zeros(16384, dtype=torch.bool, device="cuda")
        for batch in loader:
            batch = batch.cuda()
            decoded, index, commitment = model(batch)
            loss = F.mse_loss(decoded, batch) + 0.25 * commitment
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            used[index] = True
        print(f"epoch {epoch}: loss {loss.item():.4f}, {int(used.sum())} codes")


def main():
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Embeddings(4096), batch_size=512, shuffle=True)
    train(Tokenizer().cuda(), loader, epochs=3)


if __name__ == "__main__":
    main()
