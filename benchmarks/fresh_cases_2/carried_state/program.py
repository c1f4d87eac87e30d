import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    def __init__(self, vocabulary=4000, width=384):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids, state):
        outputs = []
        for x in self.tokens(ids).unbind(1):
            state = self.cell(x, state)
            outputs.append(state)
        return self.head(torch.stack(outputs, 1)), state


def train(model, stream, length=16):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.zeros(len(stream), 384, device="cuda")
    losses = []
    for at in range(0, stream.shape[1] - length, length):
        ids, target = stream[:, at : at + length], stream[:, at + 1 : at + length + 1]
        optimizer.zero_grad(set_to_none=True)
        logits, state = model(ids.cuda(), state.detach())
        loss = F.cross_entropy(logits.flatten(0, 1), target.cuda().flatten())
        loss.backward()
        del logits
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


torch.manual_seed(0)
model = Recurrent().cuda()
print(train(model, torch.randint(0, 4000, (64, 97))))
