import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.04)  # other services share the GPU


class Speech(nn.Module):
    def __init__(self, mels=80, width=256):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(mels, width), nn.ReLU(), nn.Linear(width, width))
        self.statistics = []

    @torch.no_grad()
    def forward(self, frames):
        spectrum = torch.fft.rfft(frames).abs()
        return self.encode(spectrum[..., :80]).mean(1)

    @torch.no_grad()
    def adapt(self, speaker):
        """Keeps the statistics of a speaker, which each later request is normalized with."""
        self.statistics.append(speaker.repeat(64, 1).contiguous())

    def normalized(self, x):
        for table in self.statistics:
            x = x - table[: len(x)].mean(1, keepdim=True)
        return x


model = Speech().cuda()
for request in range(4):
    frames = torch.randn(128, 400, 512, device="cuda")
    features = model(frames)
    del frames
    for speaker in range(4):
        model.adapt(torch.randn(256, 256, device="cuda"))
    print(request, model.normalized(features).shape, torch.cuda.memory_reserved() >> 20)
