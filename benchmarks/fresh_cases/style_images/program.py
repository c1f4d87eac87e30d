import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Recognizer(nn.Module):
    """Convolutions that find features, and a classifier over them."""

    def __init__(self, widths=(3, 32, 64, 128, 256), classes=1000):
        super().__init__()
        stages = []
        for a, b in zip(widths, widths[1:]):
            stages.append(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)))
        self.features = nn.ModuleList(stages)
        self.classifier = nn.Sequential(
            nn.Linear(widths[-1] * 7 * 7, 3072),
            nn.ReLU(),
            nn.Linear(3072, 3072),
            nn.ReLU(),
            nn.Linear(3072, classes),
        )

    def forward(self, x):
        for stage in self.features:
            x = stage(x)
        return self.classifier(F.adaptive_avg_pool2d(x, 7).flatten(1))


class StyleLoss(nn.Module):
    def __init__(self, recognizer, style):
        super().__init__()
        self.recognizer = recognizer.requires_grad_(False)
        with torch.no_grad():
            self.wanted = [self.gram(x) for x in self.stages(style)]

    def stages(self, x):
        for stage in self.recognizer.features:
            x = stage(x)
            yield x

    @staticmethod
    def gram(x):
        x = x.flatten(2)
        return x @ x.transpose(1, 2) / x.numel()

    def forward(self, image):
        grams = [self.gram(x) for x in self.stages(image)]
        return sum(F.mse_loss(a, b) for a, b in zip(grams, self.wanted))


def stylize(loss, content, steps=3):
    image = content.clone().requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(image) + F.mse_loss(image, content)
        value.backward()
        optimizer.step()
    return image.detach().cpu(), value.item()


recognizer = Recognizer().cuda().eval()
loss = StyleLoss(recognizer, torch.rand(1, 3, 224, 224).cuda())
contents = TensorDataset(torch.rand(3, 3, 224, 224))
images = []
for (content,) in DataLoader(contents, batch_size=1):
    image, value = stylize(loss, content.cuda())
    images.append(image)
    print(value)
print(torch.cat(images).shape)
