import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocabulary=8000, width=256):
        super().__init__()
        self.tokens = nn.EmbeddingBag(vocabulary, width)
        self.project = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, ids):
        return F.normalize(self.project(self.tokens(ids)), dim=-1)


@torch.no_grad()
def encode(model, texts, batch_size=1024):
    return torch.cat([model(ids.cuda()) for ids in texts.split(batch_size)])


@torch.no_grad()
def mine_hard_negatives(model, queries, corpus, positives, k=10):
    """The passages of the corpus that are most like each query, without its own."""
    query, passage = encode(model, queries), encode(model, corpus)
    scores = query @ passage.T
    scores.scatter_(1, positives.cuda()[:, None], float("-inf"))
    return scores.topk(k, dim=1).indices.cpu()


def train_step(model, optimizer, query, positive, negative):
    optimizer.zero_grad()
    anchor = model(query)
    candidates = torch.cat([model(positive), model(negative)])
    loss = F.cross_entropy(anchor @ candidates.T * 20, torch.arange(len(query), device="cuda"))
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(0)
count, passages = 4096, 16384
queries, corpus = (torch.randint(0, 8000, (n, 24)) for n in (count, passages))
positives = torch.randint(0, passages, (count,))
model = Encoder().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    negatives = mine_hard_negatives(model, queries, corpus, positives)[:, 0] % passages
    for at in torch.randperm(count).split(1024)[:2]:
        batch = queries[at], corpus[positives[at]], corpus[negatives[at].clamp(0, passages - 1)]
        loss = train_step(model, optimizer, *(ids.cuda() for ids in batch))
    print(epoch, loss)
