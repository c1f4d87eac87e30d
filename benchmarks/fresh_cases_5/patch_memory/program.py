import torch
from torch import nn


def distance_matrix(x, y, p=2):
    n, m, d = x.size(0), y.size(0), x.size(1)
    x = x.unsqueeze(1).expand(n, m, d)
    y = y.unsqueeze(0).expand(n, m, d)
    return torch.pow(x - y, p).sum(2)


class NN:
    def __init__(self, embeddings, p=2):
        self.train_pts, self.p = embeddings, p

    def __call__(self, x):
        return self.predict(x)


class KNN(NN):
    def __init__(self, embeddings, k=3, p=2):
        super().__init__(embeddings, p)
        self.k = k

    def predict(self, x):
        dist = distance_matrix(x, self.train_pts, self.p) ** (1 / self.p)
        return dist.topk(self.k, largest=False)


class Backbone(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
        )

    def forward(self, x):
        return self.layers(x).flatten(2).transpose(1, 2)


class PatchCore:
    def __init__(self, coreset_ratio=0.25):
        self.backbone = Backbone().cuda().eval()
        self.ratio = coreset_ratio

    @torch.no_grad()
    def fit(self, images):
        patches = torch.cat([self.backbone(x.cuda()[None])[0] for x in images])
        keep = torch.randperm(len(patches))[: int(self.ratio * len(patches))].cuda()
        self.memory = KNN(patches[keep])

    @torch.no_grad()
    def test_step(self, image):
        scores, _ = self.memory(self.backbone(image.cuda()[None])[0])
        return scores[:, 0].max().item()


def main():
    torch.manual_seed(0)
    model = PatchCore()
    model.fit(torch.rand(10, 3, 96, 96))
    for image in torch.rand(3, 3, 96, 96):
        print(model.test_step(image))


if __name__ == "__main__":
    main()
