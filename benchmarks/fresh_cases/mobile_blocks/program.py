import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class MobileBlock(nn.Module):
    """Widens the channels, weighs them by what the whole image has, and narrows them again."""

    def __init__(self, width, expand=6):
        super().__init__()
        inner = width * expand
        self.widen = nn.Linear(width, inner)
        self.squeeze = nn.Linear(inner, width // 4)
        self.excite = nn.Linear(width // 4, inner)
        self.narrow = nn.Linear(inner, width)
        self.swish = Swish()

    def forward(self, x):
        y = self.swish(self.widen(x))
        scale = self.excite(self.swish(self.squeeze(y.mean(1, keepdim=True))))
        return x + self.narrow(y * scale.sigmoid())


class MobileNet(nn.Module):
    def __init__(self, width=96, depth=4, classes=10, patch=8):
        super().__init__()
        self.patch = patch
        self.stem = nn.Linear(3 * patch**2, width)
        self.blocks = nn.Sequential(*[MobileBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        patches = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        return self.head(self.blocks(self.stem(patches)).mean(1))


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = 0
    for x, y in loader:
        right += (model(x.cuda()).argmax(1).cpu() == y).sum().item()
    model.train()
    return right


data = TensorDataset(torch.rand(64, 3, 128, 128), torch.randint(0, 10, (64,)))
model = MobileNet().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        loss = train_step(model, optimizer, x.cuda(), y.cuda())
    print(epoch, loss, evaluate(model, DataLoader(data, batch_size=32)))
