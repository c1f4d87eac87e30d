import torch
import torch.nn.functional as F
from torch import nn


class ResBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv(F.silu(self.norm(x)))


class UNetModel(nn.Module):
    def __init__(self, channels=32):
        super().__init__()
        self.conv_in = nn.Conv2d(4, channels, 3, padding=1)
        self.input_blocks = nn.ModuleList(ResBlock(channels) for _ in range(3))
        self.middle_block = ResBlock(channels)
        self.output_blocks = nn.ModuleList(ResBlock(channels) for _ in range(3))
        self.conv_out = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x, t):
        x, skips = self.conv_in(x), []
        for block in self.input_blocks:
            x = block(x)
            skips.append(x)
        x = self.middle_block(x)
        for block in self.output_blocks:
            x = block(x + skips.pop())
        return self.conv_out(x)


class LatentEdgePredictor(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(channels, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, features):
        return self.net(features.flatten(2).transpose(1, 2))


class HookUnet:
    def __init__(self):
        self.features = []

    def save_hook(self, module, inputs, output):
        self.features.append(output)

    def hook(self, unet):
        for block in (*unet.input_blocks, unet.middle_block, *unet.output_blocks):
            block.register_forward_hook(self.save_hook)

    def take_features(self):
        features, self.features = self.features, []
        return features


class Guidance:
    def __init__(self, unet, predictor, strength=1.6, stop_at=0.5):
        self.unet, self.predictor = unet, predictor
        self.strength, self.stop_at = strength, stop_at
        self.hooks = HookUnet()
        self.hooks.hook(unet)

    def gradient(self, x, t, sketch):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            self.unet(x, t)
            features = self.hooks.take_features()
            edges = sum(self.predictor(f) for f in features[3:]) / len(features[3:])
            return torch.autograd.grad(F.mse_loss(edges, sketch), x)[0]

    @torch.no_grad()
    def sample(self, sketch, steps, shape):
        x = torch.randn(shape, device="cuda")
        for step in range(steps):
            noise = self.unet(x, step)
            if step < steps * self.stop_at:
                noise = noise + self.strength * self.gradient(x, step, sketch)
            x = x - noise / steps
        return x


def main():
    torch.manual_seed(0)
    unet = UNetModel().cuda().eval().requires_grad_(False)
    predictor = LatentEdgePredictor(32).cuda().eval().requires_grad_(False)
    guidance = Guidance(unet, predictor)
    for image in range(2):
        sketch = torch.rand(1, 64 * 64, 4, device="cuda")
        result = guidance.sample(sketch, steps=20, shape=(1, 4, 64, 64))
        print(image, result.shape)


if __name__ == "__main__":
    main()
