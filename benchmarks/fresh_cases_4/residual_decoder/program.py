import torch
import torch.nn.functional as F
from torch import nn


class SegResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm3d(channels), nn.BatchNorm3d(channels)
        self.conv1 = nn.Conv3d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv3d(channels, channels, 3, padding=1)

    def forward(self, x):
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


class SegResEncoder(nn.Module):
    def __init__(self, filters=16, blocks=(1, 2, 2, 4)):
        super().__init__()
        self.conv_init = nn.Conv3d(1, filters, 3, padding=1)
        self.layers = nn.ModuleList()
        for i, count in enumerate(blocks):
            width = filters * 2**i
            down = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
            last = i == len(blocks) - 1
            self.layers.append(
                nn.ModuleDict(
                    {
                        "blocks": nn.Sequential(*[SegResBlock(width) for _ in range(count)]),
                        "downsample": nn.Identity() if last else down,
                    }
                )
            )

    def forward(self, x):
        outputs = []
        x = self.conv_init(x)
        for level in self.layers:
            x = level["blocks"](x)
            outputs.append(x)
            x = level["downsample"](x)
        return outputs


class SegResNet(nn.Module):
    def __init__(self, filters=16, depth=4, classes=3):
        super().__init__()
        self.encoder = SegResEncoder(filters)
        self.up_layers = nn.ModuleList()
        for i in reversed(range(depth - 1)):
            width = filters * 2**i
            self.up_layers.append(
                nn.ModuleDict(
                    {
                        "upsample": nn.Conv3d(2 * width, width, 1),
                        "blocks": SegResBlock(width),
                    }
                )
            )
        self.head = nn.Sequential(SegResBlock(filters), nn.Conv3d(filters, classes, 1))

    def forward(self, x):
        x_down = self.encoder(x)
        x_down.reverse()
        x = x_down[0]
        for i, level in enumerate(self.up_layers):
            x = F.interpolate(level["upsample"](x), scale_factor=2)
            x = x + x_down[i + 1]
            x = level["blocks"](x)
        return self.head(x)


class Predictor:
    def __init__(self, network, device):
        self.network = network.to(device).eval()
        self.device = device

    @torch.inference_mode()
    def __call__(self, scan):
        logits = self.network(scan.to(self.device))
        return logits.argmax(1).to(torch.uint8).cpu()


def main():
    torch.manual_seed(0)
    predictor = Predictor(SegResNet(), torch.device("cuda"))
    for case in range(3):
        labels = predictor(torch.randn(1, 1, 96, 96, 96))
        print(case, labels.shape)


if __name__ == "__main__":
    main()
