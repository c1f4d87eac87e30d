"""Denoising with a noise map, after FFDNet."""

import torch
import torch.nn as nn
import torch.optim as optim


class FFDNet(nn.Module):
    def __init__(self, features=48, layers=6):
        super().__init__()
        body = [nn.Conv2d(5, features, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(layers - 2):
            body += [nn.Conv2d(features, features, 3, padding=1), nn.BatchNorm2d(features)]
            body += [nn.ReLU(inplace=True)]
        body += [nn.Conv2d(features, 4, 3, padding=1)]
        self.body = nn.Sequential(*body)

    def forward(self, x, sigma):
        x = nn.functional.pixel_unshuffle(x, 2)
        noise_map = sigma.view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:])
        return nn.functional.pixel_shuffle(self.body(torch.cat([noise_map, x], 1)), 2)


def noisy(images, sigma):
    return images + torch.randn_like(images) * sigma.view(-1, 1, 1, 1)


def train(args):
    model = FFDNet().cuda()
    loss_fn = nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=args["lr"])

    for epoch in range(args["epochs"]):
        model.train()
        train_losses = 0
        for _ in range(args["train_batches"]):
            images = torch.rand(args["batch"], 1, 64, 64).cuda()
            sigma = torch.rand(args["batch"]).cuda() * 0.3
            optimizer.zero_grad()
            loss = loss_fn(model(noisy(images, sigma), sigma), images)
            loss.backward()
            optimizer.step()
            train_losses += loss.item()

        model.eval()
        val_losses = 0
        for _ in range(args["val_batches"]):
            images = torch.rand(args["batch"], 1, 64, 64).cuda()
            sigma = torch.full((args["batch"],), 0.1).cuda()
            val_loss = loss_fn(model(noisy(images, sigma), sigma), images)
            val_losses += val_loss

        print(f"epoch {epoch}: {train_losses:.4f} {val_losses / args['val_batches']:.4f}")


train({"lr": 1e-3, "epochs": 2, "train_batches": 4, "val_batches": 8, "batch": 16})
