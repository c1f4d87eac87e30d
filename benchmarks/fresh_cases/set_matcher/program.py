import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def pairwise_giou(a, b):
    area_a = (a[:, 2:] - a[:, :2]).clamp(min=0).prod(1)
    area_b = (b[:, 2:] - b[:, :2]).clamp(min=0).prod(1)
    low = torch.max(a[:, None, :2], b[:, :2])
    high = torch.min(a[:, None, 2:], b[:, 2:])
    overlap = (high - low).clamp(min=0).prod(-1)
    union = area_a[:, None] + area_b - overlap
    return overlap / union.clamp(min=1e-6)


class Matcher(nn.Module):
    """Says for each object of an image which of its queries should predict it."""

    @torch.no_grad()
    def forward(self, outputs, targets):
        batch, queries = outputs["boxes"].shape[:2]
        probability = outputs["logits"].flatten(0, 1).softmax(-1)
        boxes = outputs["boxes"].flatten(0, 1)
        labels = torch.cat([target["labels"] for target in targets])
        wanted = torch.cat([target["boxes"] for target in targets])
        cost = torch.cdist(boxes, wanted, p=1)
        cost -= probability[:, labels]
        cost -= pairwise_giou(boxes, wanted)
        cost = cost.view(batch, queries, -1)
        sizes = [len(target["boxes"]) for target in targets]
        return [c[i].argmin(0).cpu() for i, c in enumerate(cost.split(sizes, -1))]


class Detector(nn.Module):
    def __init__(self, width=256, queries=300, classes=40):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.image = nn.Linear(width, width)
        self.decoder = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.classes, self.boxes = nn.Linear(width, classes), nn.Linear(width, 4)

    def forward(self, features):
        x = self.decoder(self.queries + self.image(features)[:, None])
        return {"logits": self.classes(x), "boxes": self.boxes(x).sigmoid()}


def detection_loss(outputs, targets, matches):
    loss = 0.0
    for i, (target, match) in enumerate(zip(targets, matches)):
        match = match.clamp(0, outputs["boxes"].shape[1] - 1)
        loss += F.l1_loss(outputs["boxes"][i, match], target["boxes"])
        loss += F.cross_entropy(outputs["logits"][i, match], target["labels"])
    return loss / len(targets)


def collate(items):
    features, boxes, labels = map(torch.stack, zip(*items))
    targets = [{"boxes": b.cuda(), "labels": n.cuda()} for b, n in zip(boxes, labels)]
    return features.cuda(), targets


def train_step(model, matcher, optimizer, features, targets):
    optimizer.zero_grad()
    outputs = model(features)
    loss = detection_loss(outputs, targets, matcher(outputs, targets))
    loss.backward()
    optimizer.step()
    return loss.item()


n, objects = 64, 100
data = TensorDataset(
    torch.randn(n, 256), torch.rand(n, objects, 4), torch.randint(0, 40, (n, objects))
)
model, matcher = Detector().cuda(), Matcher()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for features, targets in DataLoader(data, batch_size=16, shuffle=True, collate_fn=collate):
    print(train_step(model, matcher, optimizer, features, targets))
