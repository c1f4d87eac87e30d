"""Transcribe a long recording: features of 30-second windows, decoded in small batches."""

import math

import torch
from torch import nn

RATE, WINDOW = 16000, 30


class FeatureExtractor:
    def __init__(self, bins=80, frames=1500):
        self.bins, self.frames = bins, frames
        self.filters = torch.rand(bins, 201)

    def __call__(self, samples):
        hop = samples.numel() // self.frames
        spectrum = torch.stft(samples, 400, hop, window=torch.hann_window(400), return_complex=True)
        power = spectrum[:, : self.frames].abs().square()
        return (self.filters @ power).clamp(min=1e-10).log10()


class SpeechModel(nn.Module):
    def __init__(self, bins=80, width=96, vocabulary=500):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(bins, width, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv1d(width, width, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, features):
        encoded, _ = self.encoder(self.stem(features).transpose(1, 2))
        return self.head(encoded[:, ::8])


def windows(recording):
    size = RATE * WINDOW
    for start in range(0, recording.numel(), size):
        part = recording[start : start + size]
        yield torch.nn.functional.pad(part, (0, size - part.numel()))


def collapse(ids, blank=0):
    text, last = [], blank
    for token in ids:
        if token not in (blank, last):
            text.append(token)
        last = token
    return text


class Transcriber:
    def __init__(self, device="cuda", batch_size=2):
        self.device, self.batch_size = device, batch_size
        self.extract = FeatureExtractor()
        self.model = SpeechModel().to(device).eval()

    @torch.inference_mode()
    def transcribe(self, recording):
        features = torch.stack([self.extract(part) for part in windows(recording)])
        features = features.to(self.device)
        text = []
        for start in range(0, len(features), self.batch_size):
            logits = self.model(features[start : start + self.batch_size])
            for ids in logits.argmax(-1).tolist():
                text += collapse(ids)
        return text


def main(minutes=30):
    torch.manual_seed(0)
    seconds = torch.arange(RATE * 60 * minutes) / RATE
    recording = torch.sin(2 * math.pi * 220 * seconds) * 0.1
    text = Transcriber().transcribe(recording)
    print(f"{minutes} minutes, {len(text)} tokens")


if __name__ == "__main__":
    main()
