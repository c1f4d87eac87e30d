import torch
from torch import nn


class Sentence:
    def __init__(self, length):
        self.length = length
        self.vectors = []


lm = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 1024), nn.Tanh()).cuda()
sentences = [Sentence(4 + i % 9) for i in range(320)]
with torch.no_grad():
    for start in range(0, 320, 16):
        group = sentences[start : start + 16]
        chars = torch.randint(0, 300, (16, 180), device="cuda")
        states = lm(chars)
        for row, sentence in enumerate(group):
            ends = [12 * (t + 1) for t in range(sentence.length)]
            sentence.vectors = [states[row, end] for end in ends]
vectors = torch.stack([v for s in sentences for v in s.vectors])
print(vectors.shape)
