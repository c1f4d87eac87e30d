import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5000, 256)
        self.cell = nn.LSTMCell(256, 512)
        self.out = nn.Linear(512, 40)

    def forward(self, tokens, hidden):
        h, c = self.cell(self.embed(tokens), hidden)
        return self.out(h), (h, c)


model = Tagger().cuda()
hidden = (torch.zeros(1024, 512, device="cuda"), torch.zeros(1024, 512, device="cuda"))
tags = []
for position in range(30):
    tokens = torch.randint(0, 5000, (1024,), device="cuda")
    scores, hidden = model(tokens, hidden)
    tags.append(scores.argmax(dim=1).cpu())
print(torch.stack(tags).shape)
