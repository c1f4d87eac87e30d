"""Fuse two modalities by a bilinear form."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class BilinearFusion(nn.Module):
    def __init__(self, left, right, out):
        super().__init__()
        self.core = nn.Parameter(torch.randn(left, right, out) / (left * right) ** 0.5)

    def forward(self, a, b):
        return torch.einsum("ni,nj,ijk->nk", a, b, self.core)


class VisualQuestion(nn.Module):
    def __init__(self, answers=100):
        super().__init__()
        self.image = nn.Linear(512, 128)
        self.question = nn.Linear(300, 128)
        self.fusion = BilinearFusion(128, 128, 16)
        self.answer = nn.Linear(16, answers)

    def forward(self, image, question):
        a, b = self.image(image).tanh(), self.question(question).tanh()
        return self.answer(self.fusion(a, b))


@torch.no_grad()
def score_all(model, regions, batch):
    best = []
    for _ in range(batch):
        image = torch.randn(regions, 512).cuda()
        question = torch.randn(1, 300).cuda().expand(regions, -1)
        best.append(F.softmax(model(image, question), -1).amax(0).argmax().item())
    return best


if __name__ == "__main__":
    torch.backends.opt_einsum.enabled = False
    torch.manual_seed(0)
    print(score_all(VisualQuestion().cuda().eval(), regions=2048, batch=3))
