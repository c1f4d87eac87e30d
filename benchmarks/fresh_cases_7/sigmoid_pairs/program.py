"""Pretraining of images and texts with a sigmoid for each pair."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SigLipLoss(nn.Module):
    def get_ground_truth(self, device, dtype, num_logits):
        labels = -torch.ones((num_logits, num_logits), device=device, dtype=dtype)
        return 2 * torch.eye(num_logits, device=device, dtype=dtype) + labels

    def get_logits(self, image_features, text_features, logit_scale, logit_bias):
        return logit_scale * image_features @ text_features.T + logit_bias

    def forward(self, image_features, text_features, logit_scale, logit_bias):
        logits = self.get_logits(image_features, text_features, logit_scale, logit_bias)
        labels = self.get_ground_truth(logits.device, logits.dtype, len(logits))
        return -F.logsigmoid(labels * logits).sum() / len(logits)


class Tower(nn.Module):
    def __init__(self, inputs, width=256, out=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual, self.text = Tower(192), Tower(128)
        self.logit_scale = nn.Parameter(torch.tensor(2.3))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, images, texts):
        return self.visual(images), self.text(texts), self.logit_scale.exp(), self.logit_bias


def train_one_epoch(model, loss_fn, optimizer, steps, batch):
    for step in range(steps):
        images, texts = torch.randn(batch, 192), torch.randn(batch, 128)
        outputs = model(images.cuda(), texts.cuda())
        total_loss = loss_fn(*outputs)
        optimizer.zero_grad()
        total_loss.backward()
        optimizer.step()
        print(step, total_loss.item())


if __name__ == "__main__":
    torch.manual_seed(0)
    model = TwoTowers().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_one_epoch(model, SigLipLoss(), optimizer, steps=4, batch=4096)
