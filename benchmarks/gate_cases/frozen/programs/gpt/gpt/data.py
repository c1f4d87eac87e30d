"""Random tokens in place of a corpus."""

import torch


class Tokens:
    def __init__(self, vocab_size, length=20_000, seed=1337):
        generator = torch.Generator().manual_seed(seed)
        self.stream = torch.randint(vocab_size, (length,), generator=generator)
        self.generator = generator

    def get_batch(self, batch_size, block_size, device):
        ix = torch.randint(len(self.stream) - block_size, (batch_size,), generator=self.generator)
        x = torch.stack([self.stream[i : i + block_size] for i in ix])
        y = torch.stack([self.stream[i + 1 : i + 1 + block_size] for i in ix])
        return x.to(device, non_blocking=True), y.to(device, non_blocking=True)
