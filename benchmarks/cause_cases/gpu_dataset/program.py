import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self, rows, device):
        self.device = device
        self.x = torch.randn(rows, 2048).to(device)
        self.y = torch.randint(0, 5, (rows,)).to(device)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


data = Sequences(24576, "cuda")
loader = DataLoader(data, batch_size=1024)
model = nn.Sequential(nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 5)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step, (x, y) in enumerate(loader):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 2:
        break
print(loss.item())
