"""Convolutions over edges."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def softmax(src, index, num_nodes):
    """A softmax over the edges that end at the same node."""
    out = (src - src.max().detach()).exp()
    total = out.new_zeros(num_nodes, out.size(1)).index_add(0, index, out)
    return out / (total[index] + 1e-16)


class GATConv(nn.Module):
    def __init__(self, in_channels, out_channels, heads=1, concat=False, negative_slope=0.2):
        super().__init__()
        self.heads = heads
        self.out_channels = out_channels
        self.concat = concat
        self.negative_slope = negative_slope
        self.lin = nn.Linear(in_channels, heads * out_channels, bias=False)
        self.att_src = nn.Parameter(torch.randn(1, heads, out_channels) * 0.1)
        self.att_dst = nn.Parameter(torch.randn(1, heads, out_channels) * 0.1)

    def forward(self, x, edge_index):
        src, dst = edge_index
        h = self.lin(x).view(-1, self.heads, self.out_channels)
        alpha = (h * self.att_src).sum(-1)[src] + (h * self.att_dst).sum(-1)[dst]
        alpha = softmax(F.leaky_relu(alpha, self.negative_slope), dst, len(x))
        out = h.new_zeros(h.shape).index_add(0, dst, self.message(h[src], alpha))
        return out.flatten(1) if self.concat else out.mean(1)

    def message(self, x_j, alpha):
        return x_j * alpha.unsqueeze(-1)


class JumpingKnowledge(nn.Module):
    def __init__(self, mode, channels, num_layers):
        super().__init__()
        self.mode = mode
        self.out_channels = channels * num_layers if mode == "cat" else channels

    def forward(self, xs):
        return torch.cat(xs, dim=-1) if self.mode == "cat" else xs[-1]
