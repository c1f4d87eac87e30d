"""A corpus of random words."""

import torch


class Corpus:
    def __init__(self, data):
        generator = torch.Generator().manual_seed(1)
        self.ntokens = data.getint("ntokens")
        self.train = torch.randint(
            self.ntokens, (data.getint("train_tokens"),), generator=generator
        )
        self.valid = torch.randint(
            self.ntokens, (data.getint("valid_tokens"),), generator=generator
        )


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    return data.view(bsz, -1).t().contiguous()


def get_batch(source, i, bptt, device):
    seq_len = min(bptt, len(source) - 1 - i)
    data = source[i : i + seq_len].to(device)
    target = source[i + 1 : i + 1 + seq_len].reshape(-1).to(device)
    return data, target
