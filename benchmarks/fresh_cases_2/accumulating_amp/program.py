import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, width=768, depth=4, classes=50):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


def train(model, loader, parts=4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    scaler = torch.amp.GradScaler("cuda")
    optimizer.zero_grad()
    for number, (x, y) in enumerate(loader, 1):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda()) / parts
        scaler.scale(loss).backward()
        if number % parts == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return loss.item()


data = TensorDataset(torch.randn(128, 128, 768), torch.randint(0, 50, (128,)))
model = Classifier().cuda()
print(train(model, DataLoader(data, batch_size=16, shuffle=True)))
