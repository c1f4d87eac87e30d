"""Translation with an attentive decoder, whose losses of all words go back together."""

import random

import torch
import torch.nn.functional as F
from torch import nn


class EncoderRNN(nn.Module):
    def __init__(self, words, hidden):
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, sentence):
        return self.gru(self.embedding(sentence))


class AttnDecoderRNN(nn.Module):
    def __init__(self, words, hidden):
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.gru = nn.GRUCell(2 * hidden, hidden)
        self.out = nn.Linear(2 * hidden, words)

    def forward(self, word, hidden, encoder_outputs):
        weights = (encoder_outputs @ hidden.unsqueeze(2)).softmax(1)
        context = (weights * encoder_outputs).sum(1)
        hidden = self.gru(torch.cat([self.embedding(word), context], 1), hidden)
        return self.out(torch.cat([hidden, context], 1)), hidden


def train(source, target, encoder, decoder, optimizers, teacher_forcing_ratio=0.5):
    for optimizer in optimizers:
        optimizer.zero_grad()
    encoder_outputs, hidden = encoder(source)
    hidden = hidden[0]
    word = torch.zeros(len(source), dtype=torch.long, device=source.device)
    teacher = random.random() < teacher_forcing_ratio
    loss = 0
    for step in range(target.shape[1]):
        output, hidden = decoder(word, hidden, encoder_outputs)
        loss += F.cross_entropy(output, target[:, step])
        word = target[:, step] if teacher else output.argmax(1)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item() / target.shape[1]


def train_iters(iterations, words=3000, hidden=256, batch=48, length=20):
    encoder, decoder = EncoderRNN(words, hidden).cuda(), AttnDecoderRNN(words, hidden).cuda()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (encoder, decoder)]
    for iteration in range(iterations):
        source, target = torch.randint(1, words, (2, batch, length)).cuda()
        print(iteration, train(source, target, encoder, decoder, optimizers))


if __name__ == "__main__":
    random.seed(3)
    torch.manual_seed(0)
    train_iters(4)
