"""A language model over long streams: the state is carried, its graph is not."""

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self, vocabulary, width=256, layers=2):
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, layers)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output), hidden

    def init_hidden(self, batch):
        weight = next(self.parameters())
        zeros = weight.new_zeros(self.rnn.num_layers, batch, self.rnn.hidden_size)
        return zeros, zeros.clone()


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def get_batch(source, i, bptt):
    length = min(bptt, len(source) - 1 - i)
    return source[i : i + length], source[i + 1 : i + 1 + length].reshape(-1)


def evaluate(model, source, bptt):
    model.eval()
    total = 0.0
    hidden = model.init_hidden(source.shape[1])
    with torch.no_grad():
        for i in range(0, len(source) - 1, bptt):
            data, targets = get_batch(source, i, bptt)
            output, hidden = model(data.cuda(), hidden)
            total += (
                len(data) * nn.functional.cross_entropy(output.flatten(0, 1), targets.cuda()).item()
            )
    return total / (len(source) - 1)


def train(model, source, bptt, lr=1.0):
    model.train()
    hidden = model.init_hidden(source.shape[1])
    for i in range(0, len(source) - 1, bptt):
        data, targets = get_batch(source, i, bptt)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data.cuda(), hidden)
        nn.functional.cross_entropy(output.flatten(0, 1), targets.cuda()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)


def main():
    torch.manual_seed(0)
    text = torch.randint(0, 4000, (201, 20))
    model = RNNModel(4000).cuda()
    for epoch in range(2):
        train(model, text, bptt=35)
        print(epoch, evaluate(model, text[:71], bptt=35))


if __name__ == "__main__":
    main()
