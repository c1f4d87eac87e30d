"""Semi-supervised images: an average of the weights labels what the student learns from."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class WideNet(nn.Module):
    def __init__(self, width=48, classes=10):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.1),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        return self.head(self.layers(x))


class AveragedModel:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.module.state_dict().values(), model.state_dict().values()):
            if average.is_floating_point():
                average.lerp_(value, 1 - self.decay)
            else:
                average.copy_(value)


def weak(images):
    return images.flip(-1)


def strong(images):
    return (images + 0.3 * torch.randn_like(images)).clamp(0, 1)


def training_step(student, teacher, labelled, unlabelled, threshold=0.2):
    images, labels = labelled
    with torch.no_grad():
        confidence, pseudo = teacher.module(weak(unlabelled)).softmax(-1).max(-1)
    logits = student(torch.cat([images, strong(unlabelled)]))
    supervised = F.cross_entropy(logits[: len(images)], labels)
    consistent = F.cross_entropy(logits[len(images) :], pseudo, reduction="none")
    return supervised + (consistent * (confidence > threshold)).mean()


@torch.no_grad()
def accuracy(model, batches):
    right = total = 0
    for images, labels in batches:
        right += (model(images).argmax(-1) == labels).sum().item()
        total += len(labels)
    return right / total


def batches(count, size, device="cuda"):
    for _ in range(count):
        yield torch.rand(size, 3, 32, 32).to(device), torch.randint(0, 10, (size,)).to(device)


def main(epochs=2):
    torch.manual_seed(0)
    student = WideNet().cuda()
    teacher = AveragedModel(student, decay=0.99)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    for epoch in range(epochs):
        for labelled, (unlabelled, _) in zip(batches(3, 32), batches(3, 224)):
            loss = training_step(student, teacher, labelled, unlabelled)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            teacher.update(student)
        print(epoch, loss.item(), accuracy(teacher.module, batches(2, 64)))


if __name__ == "__main__":
    main()
