import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, width))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class FlatIndex:
    """Exact search: the vectors stay on the GPU, queries come in blocks."""

    def __init__(self, width, capacity, dtype=torch.float16):
        self.vectors = torch.empty(capacity, width, dtype=dtype, device="cuda")
        self.count = 0

    def add(self, vectors):
        end = self.count + len(vectors)
        self.vectors[self.count : end] = vectors.to(self.vectors.dtype)
        self.count = end

    def search(self, queries, k, block=64):
        indices = []
        for part in queries.to(self.vectors.dtype).split(block):
            scores = part @ self.vectors[: self.count].T
            indices.append(scores.topk(k).indices.cpu())
        return torch.cat(indices)


class Service:
    def __init__(self, encoder, capacity, width):
        self.encoder = encoder.cuda().eval()
        self.index = FlatIndex(width, capacity)

    @torch.no_grad()
    def ingest(self, documents, batch_size=2000):
        for part in documents.split(batch_size):
            self.index.add(self.encoder(part.cuda()))

    @torch.no_grad()
    def answer(self, queries, k=10):
        return self.index.search(self.encoder(queries.cuda()), k)


def main():
    torch.manual_seed(0)
    service = Service(Encoder(64, 256), 200_000, 256)
    for _ in range(10):
        service.ingest(torch.randn(20_000, 64))
    for _ in range(3):
        print(service.answer(torch.randn(512, 64)).shape)


if __name__ == "__main__":
    main()
