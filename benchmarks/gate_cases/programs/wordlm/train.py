"""Trains a recurrent language model on random words."""

import configparser
import math

import torch
import torch.nn as nn

from lm.corpus import Corpus, batchify, get_batch
from lm.model import RNNModel

device = torch.device("cuda")
criterion = nn.NLLLoss()


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


def evaluate(model, data_source, bsz, bptt, limit):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(bsz)
    starts = range(0, min(len(data_source) - 1, limit * bptt), bptt)
    with torch.no_grad():
        for i in starts:
            data, targets = get_batch(data_source, i, bptt, device)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += criterion(output, targets).item()
    return total_loss / len(starts)


def train(model, train_data, settings, bsz, bptt):
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(bsz)
    lr = settings.getfloat("lr")
    starts = range(0, train_data.size(0) - 1, bptt)
    for batch, i in enumerate(starts[: settings.getint("max_batches")]):
        data, targets = get_batch(train_data, i, bptt, device)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.getfloat("clip"), foreach=False)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % settings.getint("log_interval") == 0:
            print(f"batch {batch} | loss {total_loss / (batch + 1):.2f}")


def main():
    settings = configparser.ConfigParser()
    settings.read("settings.ini")
    data, options = settings["data"], settings["model"]
    torch.manual_seed(1111)
    corpus = Corpus(data)
    bsz, eval_bsz = data.getint("batch_size"), data.getint("eval_batch_size")
    train_data = batchify(corpus.train, bsz)
    val_data = batchify(corpus.valid, eval_bsz)
    model = RNNModel(
        corpus.ntokens,
        options.getint("emsize"),
        options.getint("nhid"),
        options.getint("nlayers"),
        options.getfloat("dropout"),
        options.getboolean("tied"),
    ).to(device)
    for epoch in range(settings["training"].getint("epochs")):
        train(model, train_data, settings["training"], bsz, data.getint("bptt"))
        val_loss = evaluate(model, val_data, eval_bsz, data.getint("bptt"), 2)
        print(f"epoch {epoch} | valid ppl {math.exp(val_loss):.2f}")


if __name__ == "__main__":
    main()
