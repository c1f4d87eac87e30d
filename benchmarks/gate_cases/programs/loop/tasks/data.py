"""Random sentences, in pairs."""

import torch


class Sentences:
    def __init__(
        self,
        vocab_size,
        batch_size,
        val_batch_size,
        source_len,
        target_len,
        train_batches,
        val_batches,
    ):
        self.vocab_size = vocab_size
        self.sizes = {"train": batch_size, "val": val_batch_size}
        self.lengths = {"source": source_len, "target": target_len + 1}
        self.counts = {"train": train_batches, "val": val_batches}

    def _batches(self, kind, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.counts[kind]):
            yield {
                name: torch.randint(
                    self.vocab_size, (self.sizes[kind], length), generator=generator
                )
                for name, length in self.lengths.items()
            }

    def train_dataloader(self):
        return self._batches("train", 1)

    def val_dataloader(self):
        return self._batches("val", 2)
