"""Instructions of different lengths, and how they are collated."""

import torch

CROSS_ENTROPY_IGNORE_IDX = -100


class InstructDataset:
    def __init__(self, vocab_size, max_seq_len, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(90, 131, (count,), generator=generator).clamp(max=max_seq_len)
        self.samples = [torch.randint(1, vocab_size, (n,), generator=generator) for n in lengths]
        self.max_seq_len = max_seq_len

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        tokens = self.samples[index]
        return {"tokens": tokens, "labels": tokens.clone()}


def pad_to(sequence, length, value):
    return torch.cat([sequence, sequence.new_full((length - len(sequence),), value)])


def padded_collate_sft(batch, padding_idx=0, ignore_idx=CROSS_ENTROPY_IGNORE_IDX):
    longest = max(len(row["tokens"]) for row in batch)
    tokens = torch.stack([pad_to(row["tokens"], longest, padding_idx) for row in batch])
    labels = torch.stack([pad_to(row["labels"], longest, ignore_idx) for row in batch])
    return {"tokens": tokens, "labels": labels}


def batches(dataset, batch_size, collate_fn=padded_collate_sft):
    for start in range(0, len(dataset) - batch_size + 1, batch_size):
        yield collate_fn([dataset[i] for i in range(start, start + batch_size)])
