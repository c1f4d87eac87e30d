import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Recommender(nn.Module):
    """Scores of items for a user, from the items that the user has bought."""

    def __init__(self, items=500_000, width=64):
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.user = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, history, candidates):
        user = self.user(self.items(history).mean(1))
        return (self.items(candidates) * user[:, None]).sum(-1)


def train_step(model, optimizer, history, candidates):
    optimizer.zero_grad()
    scores = model(history, candidates)
    target = torch.zeros(len(scores), dtype=torch.long, device="cuda")
    loss = F.cross_entropy(scores, target)
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(0)
users, items = 1024, 500_000
data = TensorDataset(torch.randint(0, items, (users, 30)), torch.randint(0, items, (users, 50)))
model = Recommender(items).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for history, candidates in DataLoader(data, batch_size=256, shuffle=True):
        loss = train_step(model, optimizer, history.cuda(), candidates.cuda())
    print(epoch, loss)
