import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Cell(nn.Module):
    """One step of a recurrent decoder that looks at the whole source."""

    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, width)
        self.update = nn.Linear(3 * width, width)
        self.candidate = nn.Linear(3 * width, width)

    def forward(self, x, hidden, source):
        weights = (source @ self.query(hidden)[:, :, None]).squeeze(2).softmax(1)
        context = (weights[:, None] @ source).squeeze(1)
        inputs = torch.cat([x, hidden, context], 1)
        gate = self.update(inputs).sigmoid()
        return torch.lerp(hidden, self.candidate(inputs).tanh(), gate)


class Translator(nn.Module):
    def __init__(self, vocabulary=2000, width=512):
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        self.encoder = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.cell = Cell(width)
        self.head = nn.Linear(width, vocabulary)

    def loss(self, source, target):
        memory = self.encoder(self.source(source))
        hidden = memory.mean(1)
        total = 0.0
        for step in range(target.shape[1] - 1):
            hidden = self.cell(self.target(target[:, step]), hidden, memory)
            total = total + F.cross_entropy(self.head(hidden), target[:, step + 1])
        return total / (target.shape[1] - 1)

    @torch.no_grad()
    def translate(self, source, length):
        memory = self.encoder(self.source(source))
        hidden = memory.mean(1)
        words = torch.zeros(len(source), dtype=torch.long, device=source.device)
        answer = []
        for _ in range(length):
            hidden = self.cell(self.target(words), hidden, memory)
            words = self.head(hidden).argmax(1).clamp(0, 1999)
            answer.append(words.cpu())
        return torch.stack(answer, 1)


def train_step(model, optimizer, source, target):
    optimizer.zero_grad()
    loss = model.loss(source, target)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    return loss.item()


def evaluate(model, loader):
    right = 0
    for source, target in loader:
        right += (model.translate(source.cuda(), 8) == target[:, :8]).sum().item()
    return right


data = TensorDataset(torch.randint(0, 2000, (256, 48)), torch.randint(0, 2000, (256, 48)))
model = Translator().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
for source, target in DataLoader(data, batch_size=128, shuffle=True):
    loss = train_step(model, optimizer, source.cuda(), target.cuda())
print(loss, evaluate(model, DataLoader(data, batch_size=128)))
