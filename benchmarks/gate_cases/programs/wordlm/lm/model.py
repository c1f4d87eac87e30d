"""A recurrent language model."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GRUCell(nn.Module):
    def __init__(self, ninp, nhid):
        super().__init__()
        self.w_ih = nn.Linear(ninp, 3 * nhid)
        self.w_hh = nn.Linear(nhid, 3 * nhid)

    def forward(self, gates, h):
        i_r, i_z, i_n = gates.chunk(3, -1)
        h_r, h_z, h_n = self.w_hh(h).chunk(3, -1)
        r = torch.sigmoid(i_r + h_r)
        z = torch.sigmoid(i_z + h_z)
        n = torch.tanh(i_n + r * h_n)
        return n + z * (h - n)


class GRU(nn.Module):
    def __init__(self, ninp, nhid, nlayers):
        super().__init__()
        self.cells = nn.ModuleList(
            GRUCell(ninp if layer == 0 else nhid, nhid) for layer in range(nlayers)
        )

    def forward(self, x, hidden):
        last = []
        for cell, h in zip(self.cells, hidden):
            outputs = []
            for gates in cell.w_ih(x):
                h = cell(gates, h)
                outputs.append(h)
            x = torch.stack(outputs)
            last.append(h)
        return x, torch.stack(last)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.5, tie_weights=False):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = GRU(ninp, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            if nhid != ninp:
                raise ValueError("When using the tied flag, nhid must be equal to emsize")
            self.decoder.weight = self.encoder.weight
        self.ntoken = ntoken
        self.nhid = nhid
        self.nlayers = nlayers

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid)
