"""Deblurring with a perceptual loss."""

import torch
import torch.nn as nn


def vgg_features(width=32):
    layers = []
    channels = 3
    for block, depth in enumerate((2, 2, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width << block, 3, padding=1), nn.ReLU()]
            channels = width << block
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class PerceptualLoss:
    def initialize(self, loss):
        self.criterion = loss
        self.contentFunc = self.contentFuncBuild()

    def contentFuncBuild(self, conv_3_3_layer=14):
        cnn = vgg_features().cuda()
        model = nn.Sequential()
        for i, layer in enumerate(cnn):
            model.add_module(str(i), layer)
            if i == conv_3_3_layer:
                break
        return model

    def get_loss(self, fakeIm, realIm):
        f_fake = self.contentFunc(fakeIm)
        f_real = self.contentFunc(realIm)
        f_real_no_grad = f_real.detach()
        return self.criterion(f_fake, f_real_no_grad)


class ResnetGenerator(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.head = nn.Conv2d(3, width, 7, padding=3)
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.tail = nn.Conv2d(width, 3, 7, padding=3)

    def forward(self, x):
        h = self.head(x).relu()
        return x + self.tail(h + self.body(h))


class ContentModel:
    def __init__(self):
        self.net = ResnetGenerator().cuda()
        self.loss = PerceptualLoss()
        self.loss.initialize(nn.MSELoss())
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-4)

    def optimize_parameters(self, blurred, sharp):
        fake = self.net(blurred)
        loss = self.loss.get_loss(fake, sharp) + (fake - sharp).abs().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = ContentModel()
    for step in range(4):
        sharp = torch.rand(4, 3, 128, 128, device="cuda")
        blurred = nn.functional.avg_pool2d(sharp, 5, 1, 2)
        print(step, model.optimize_parameters(blurred, sharp))
