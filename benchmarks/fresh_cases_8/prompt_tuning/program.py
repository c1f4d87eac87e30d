"""Learnable context for the prompts of an image and text model."""

import torch
import torch.nn.functional as F
from torch import nn


class Transformer(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class ImageEncoder(nn.Module):
    def __init__(self, width=384, patch=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, stride=patch)
        self.transformer = Transformer(width, 4)

    def forward(self, image):
        return self.transformer(self.conv1(image).flatten(2).transpose(1, 2)).mean(1)


class PromptLearner(nn.Module):
    def __init__(self, classnames, n_ctx=8, width=384):
        super().__init__()
        self.ctx = nn.Parameter(torch.randn(n_ctx, width) * 0.02)
        self.register_buffer("names", torch.randn(len(classnames), 4, width))

    def forward(self):
        ctx = self.ctx.expand(len(self.names), -1, -1)
        return torch.cat([ctx, self.names], 1)


class CustomCLIP(nn.Module):
    def __init__(self, classnames):
        super().__init__()
        self.prompt_learner = PromptLearner(classnames)
        self.image_encoder = ImageEncoder()
        self.text_encoder = Transformer(384, 2)

    def forward(self, image):
        image_features = F.normalize(self.image_encoder(image), dim=-1)
        text_features = F.normalize(self.text_encoder(self.prompt_learner()).mean(1), dim=-1)
        return 100 * image_features @ text_features.t()


class CoOp:
    def __init__(self, classnames):
        self.model = CustomCLIP(classnames).cuda()
        self.optim = torch.optim.SGD(self.model.prompt_learner.parameters(), lr=0.002)

    def forward_backward(self, image, label):
        loss = F.cross_entropy(self.model(image), label)
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = CoOp(["cat", "dog", "car", "plane", "ship"])
    for _ in range(4):
        label = torch.randint(0, 5, (16,)).cuda()
        print(trainer.forward_backward(torch.rand(16, 3, 160, 160).cuda(), label))
