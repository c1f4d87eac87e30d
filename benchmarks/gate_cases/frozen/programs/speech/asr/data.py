"""Utterances of different lengths in batches."""

import torch


class Utterances:
    def __init__(self, count, input_size, vocab_size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(120, 361, (count,), generator=generator).tolist()
        self.features = [torch.randn(n, input_size, generator=generator) for n in self.lengths]
        self.targets = [
            torch.randint(vocab_size, (n // 4,), generator=generator) for n in self.lengths
        ]


class NumElementsBatchSampler:
    """Batches of at most ``batch_bins`` frames, padding included."""

    def __init__(self, lengths, batch_bins, sort=True):
        order = list(range(len(lengths)))
        if sort:
            order.sort(key=lambda i: lengths[i])
        self.batches, batch = [], []
        for i in order:
            longest = max(lengths[j] for j in [*batch, i])
            if batch and longest * (len(batch) + 1) > batch_bins:
                self.batches.append(batch)
                batch = []
            batch.append(i)
        self.batches.append(batch)

    def __iter__(self):
        return iter(self.batches)


class CommonCollateFn:
    def __init__(self, float_pad_value=0.0, int_pad_value=-1, multiple=1):
        self.float_pad_value = float_pad_value
        self.int_pad_value = int_pad_value
        self.multiple = multiple

    def __call__(self, features, targets):
        longest = max(len(feature) for feature in features)
        longest = (longest + self.multiple - 1) // self.multiple * self.multiple
        speech = torch.full((len(features), longest, features[0].shape[1]), self.float_pad_value)
        text = torch.full((len(features), longest // 4), self.int_pad_value)
        for row, (feature, target) in enumerate(zip(features, targets)):
            speech[row, : len(feature)] = feature
            text[row, : len(target)] = target
        return speech, torch.tensor([len(f) for f in features]), text
