import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, inputs, width=512, out=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(inputs, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, out),
        )

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class GradCache:
    """Contrastive loss of a large batch, whose towers run chunk by chunk."""

    def __init__(self, models, chunk_size, temperature=0.05):
        self.models, self.chunk_size, self.temperature = models, chunk_size, temperature

    def loss(self, queries, passages):
        scores = queries @ passages.T / self.temperature
        return F.cross_entropy(scores, torch.arange(len(queries), device=scores.device))

    @torch.no_grad()
    def represent(self, model, chunks):
        return torch.cat([model(chunk) for chunk in chunks])

    def step(self, *inputs):
        chunked = [x.split(self.chunk_size) for x in inputs]
        outputs = [
            self.represent(model, chunks).requires_grad_()
            for model, chunks in zip(self.models, chunked)
        ]
        loss = self.loss(*outputs)
        loss.backward()
        for model, chunks, output in zip(self.models, chunked, outputs):
            for chunk, gradient in zip(chunks, output.grad.split(self.chunk_size)):
                model(chunk).backward(gradient)
        return loss.item()


def main():
    torch.manual_seed(0)
    towers = nn.ModuleList([Tower(256), Tower(384)]).cuda()
    optimizer = torch.optim.AdamW(towers.parameters(), lr=1e-4)
    cache = GradCache(towers, chunk_size=256)
    for _ in range(4):
        optimizer.zero_grad()
        loss = cache.step(torch.randn(2048, 256).cuda(), torch.randn(2048, 384).cuda())
        optimizer.step()
    print(loss)


if __name__ == "__main__":
    main()
