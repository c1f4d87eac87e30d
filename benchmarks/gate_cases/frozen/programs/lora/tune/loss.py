"""Cross entropy of logits that come in chunks."""

import torch.nn.functional as F

from tune.data import CROSS_ENTROPY_IGNORE_IDX


class CEWithChunkedOutputLoss:
    def __init__(self, num_output_chunks=8):
        self.num_output_chunks = num_output_chunks

    def compute_cross_entropy(self, logits, labels):
        return F.cross_entropy(
            logits.float(),
            labels,
            ignore_index=CROSS_ENTROPY_IGNORE_IDX,
            reduction="sum",
        )

    def __call__(self, logits, labels):
        total = (labels != CROSS_ENTROPY_IGNORE_IDX).sum()
        if not isinstance(logits, list):
            return self.compute_cross_entropy(logits.flatten(0, 1), labels.flatten()) / total
        loss = 0.0
        for part, right in zip(logits, labels.chunk(self.num_output_chunks, dim=1)):
            loss = loss + self.compute_cross_entropy(part.flatten(0, 1), right.flatten())
        return loss / total
