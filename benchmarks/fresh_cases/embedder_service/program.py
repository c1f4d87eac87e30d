import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(nn.Module):
    def __init__(self, width, depth, letters=32):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.mix = nn.Linear(width, width)

    def forward(self, ids):
        x = self.letters(ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x + self.mix(x.mean(1, keepdim=True))


class Embedder:
    """Embeds protein sequences with one language model."""

    def __init__(self, name, width, depth, device):
        self.name, self.device = name, device
        self.model = LanguageModel(width, depth).to(device).eval()

    @torch.no_grad()
    def embed(self, loader):
        reduced = []
        for (ids,) in loader:
            reduced.append(self.model(ids.to(self.device)).mean(1).cpu())
        return torch.cat(reduced)


class Service:
    def __init__(self, sizes, device):
        self.embedders = {
            name: Embedder(name, width, depth, device) for name, (width, depth) in sizes.items()
        }

    def answer(self, request):
        embedder = self.embedders[request["model"]]
        sequences = TensorDataset(request["ids"])
        return embedder.embed(DataLoader(sequences, batch_size=request["batch_size"]))


def train_probe(embeddings, labels, classes=3):
    probe = nn.Linear(embeddings.shape[1], classes).cuda()
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
    for x, y in DataLoader(TensorDataset(embeddings, labels), batch_size=16):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(probe(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
    return loss.item()


sizes = {"seqvec": (512, 4), "bert": (1280, 20), "t5": (1536, 16), "xlnet": (1024, 24)}
service = Service(sizes, torch.device("cuda"))
labels = torch.randint(0, 3, (32,))
for name, length, batch_size in [
    ("seqvec", 512, 32),
    ("bert", 64, 8),
    ("t5", 64, 8),
    ("xlnet", 64, 8),
]:
    ids = torch.randint(0, 32, (32, length))
    embeddings = service.answer({"model": name, "ids": ids, "batch_size": batch_size})
    print(name, train_probe(embeddings, labels))
