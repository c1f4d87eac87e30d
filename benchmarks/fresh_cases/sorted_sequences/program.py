import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Encoder(nn.Module):
    def __init__(self, vocabulary=4000, width=384, depth=3):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, ids):
        x = self.tokens(ids)
        for up, down in zip(self.up, self.down):
            x = x + down(F.gelu(up(x)))
        return x.mean(1)


class SortedLoader:
    """Batches of sequences that are about as long as each other, without padding in between."""

    def __init__(self, sequences, batch_size):
        self.sequences, self.batch_size = sequences, batch_size
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        self.order = lengths.argsort(stable=True).tolist()

    def __iter__(self):
        for start in range(0, len(self.order), self.batch_size):
            chosen = self.order[start : start + self.batch_size]
            batch = [self.sequences[i] for i in chosen]
            yield chosen, nn.utils.rnn.pad_sequence(batch, batch_first=True)


@torch.no_grad()
def embed(encoder, sequences, batch_size):
    embeddings = torch.zeros(len(sequences), 384)
    for chosen, ids in SortedLoader(sequences, batch_size):
        embeddings[chosen] = encoder(ids.cuda()).cpu()
    return embeddings


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def probe(embeddings, labels):
    model = nn.Linear(embeddings.shape[1], 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(TensorDataset(embeddings, labels), batch_size=64, shuffle=True):
        loss = train_step(model, optimizer, x.cuda(), y.cuda())
    return loss


generator = torch.Generator().manual_seed(0)
lengths = torch.randint(64, 512, (768,), generator=generator).tolist()
sequences = [torch.randint(0, 4000, (length,), generator=generator) for length in lengths]
encoder = Encoder().cuda().eval()
embeddings = embed(encoder, sequences, batch_size=64)
print(probe(embeddings, torch.randint(0, 2, (768,), generator=generator)))
print(torch.cuda.max_memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20)
