import torch
import torch.nn.functional as F
from torch import nn


class Membranes(nn.Module):
    def __init__(self, width=12, classes=4):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1), nn.ReLU(), nn.Conv3d(width, classes, 1)
        )

    def forward(self, x):
        return self.layers(x)


FLIPS = [(), (2,), (3,), (4,), (2, 3), (2, 4), (3, 4), (2, 3, 4)]


class TestTimeAugmentor:
    """The mean of the predictions of a volume in all orientations."""

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def predict(self, volume):
        predictions = []
        for axes in FLIPS:
            flipped = volume.flip(axes) if axes else volume
            result = self.model(flipped).sigmoid()
            predictions.append(result.flip(axes) if axes else result)
        return torch.stack(predictions).mean(0)


def train_step(model, optimizer, volume, label):
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(volume), label)
    loss.backward()
    optimizer.step()
    return loss.item()


model = Membranes().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    volume, label = torch.randn(2, 1, 32, 48, 48), torch.rand(2, 4, 32, 48, 48)
    loss = train_step(model, optimizer, volume.cuda(), label.cuda())
model.eval()
augmentor = TestTimeAugmentor(model)
for scan in range(2):
    volume = torch.randn(1, 1, 64, 128, 128)
    print(loss, augmentor.predict(volume.cuda()).cpu().gt(0.5).float().mean().item())
