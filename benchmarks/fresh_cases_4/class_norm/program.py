import torch
import torch.nn.functional as F
from torch import nn


class CLADE(nn.Module):
    """Class-adaptive normalization: scale and shift are looked up for each pixel's class."""

    def __init__(self, channels, classes):
        super().__init__()
        self.norm = nn.InstanceNorm2d(channels, affine=False)
        self.weight = nn.Parameter(torch.randn(classes, channels))
        self.bias = nn.Parameter(torch.zeros(classes, channels))

    def affine_gather(self, segmap):
        n, h, w = segmap.shape
        classes, channels = self.weight.shape
        index = segmap.view(n, 1, 1, h, w).expand(n, 1, channels, h, w)
        table = torch.stack([self.weight, self.bias])[:, None, :, :, None, None]
        table = table.expand(2, n, classes, channels, h, w).contiguous()
        index = index.unsqueeze(0).expand(2, n, 1, channels, h, w)
        return table.gather(2, index).squeeze(2)

    def forward(self, x, segmap):
        segmap = F.interpolate(segmap[:, None].float(), size=x.shape[2:], mode="nearest")
        weight, bias = self.affine_gather(segmap[:, 0].long())
        return self.norm(x) * weight + bias


class ResnetBlock(nn.Module):
    def __init__(self, fin, fout, classes):
        super().__init__()
        self.norm_0, self.norm_1 = CLADE(fin, classes), CLADE(fout, classes)
        self.conv_0 = nn.Conv2d(fin, fout, 3, padding=1)
        self.conv_1 = nn.Conv2d(fout, fout, 3, padding=1)
        self.shortcut = nn.Conv2d(fin, fout, 1, bias=False)

    def forward(self, x, segmap):
        y = self.conv_0(F.leaky_relu(self.norm_0(x, segmap), 0.2))
        y = self.conv_1(F.leaky_relu(self.norm_1(y, segmap), 0.2))
        return self.shortcut(x) + y


class Generator(nn.Module):
    def __init__(self, width=16, classes=20):
        super().__init__()
        self.first = nn.Conv2d(3, 4 * width, 3, padding=1)
        self.blocks = nn.ModuleList(
            [ResnetBlock(4 * width, 2 * width, classes), ResnetBlock(2 * width, width, classes)]
        )
        self.image = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noise, segmap):
        x = self.first(F.interpolate(noise, scale_factor=0.25))
        for block in self.blocks:
            x = F.interpolate(block(x, segmap), scale_factor=2)
        return torch.tanh(self.image(F.leaky_relu(x, 0.2)))


class Sampler:
    def __init__(self, generator):
        self.generator = generator.cuda().eval()

    @torch.no_grad()
    def sample(self, segmaps):
        noise = torch.randn(len(segmaps), 3, *segmaps.shape[1:], device="cuda")
        return self.generator(noise, segmaps.cuda()).mul(127.5).add(127.5).byte().cpu()


def main():
    torch.manual_seed(0)
    sampler = Sampler(Generator())
    for index in range(3):
        segmaps = torch.randint(0, 20, (2, 256, 256))
        print(index, sampler.sample(segmaps).shape)


if __name__ == "__main__":
    main()
