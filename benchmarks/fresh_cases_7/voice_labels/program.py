"""Apply a voice type classifier to long recordings."""

import torch
from torch import nn


class SincNetLike(nn.Module):
    def __init__(self, width=64, classes=6):
        super().__init__()
        self.front = nn.Conv1d(1, width, 251, stride=20, padding=125)
        self.lstm = nn.LSTM(width, 64, batch_first=True, bidirectional=True)
        self.classify = nn.Linear(128, classes)

    def forward(self, waveform):
        x = self.front(waveform.unsqueeze(1)).abs().log1p().transpose(1, 2)
        x, _ = self.lstm(x)
        return self.classify(x).sigmoid()


def chunks(seconds, rate=4000, batch=8):
    for _ in range(seconds // batch):
        yield torch.randn(batch, rate * 2)


class Application:
    def __init__(self, model, threshold=0.5):
        self.model = model.cuda().eval()
        self.threshold = threshold
        self.intervals = []

    def _to_intervals(self, scores):
        active = scores > self.threshold
        return active.float().mean(dim=(0, 1)).tolist()

    def apply(self, recording):
        predictions = []
        for batch in recording:
            p = self.model(batch.to(torch.device("cuda:0")))
            predictions.append(p)
        self.intervals.append(self._to_intervals(torch.cat(predictions)))


if __name__ == "__main__":
    torch.manual_seed(0)
    app = Application(SincNetLike())
    for name in ("morning", "evening"):
        app.apply(chunks(96))
        print(name, app.intervals[-1])
