import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab=24000, width=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, labels=None):
        logits = self.head(self.embed(ids))
        logits = logits.float()
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, logits


model = Model().cuda().half().eval()
with torch.no_grad():
    for batch in range(3):
        ids = torch.randint(0, 24000, (2, 1024), device="cuda")
        _, logits = model(ids)
        best = logits.topk(5).indices
        del logits
print(best.shape)
