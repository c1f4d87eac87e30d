import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class DPOConfig:
    beta: float = 0.1
    lr: float = 1e-5
    batch_size: int = 4
    epochs: int = 2
    precompute_ref_log_probs: bool = True


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class Policy(nn.Module):
    def __init__(self, vocabulary=4000, width=768, depth=6, heads=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sequence_logps(logits, ids):
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return -losses.view(len(ids), -1).sum(1)


class DPOTrainer:
    def __init__(self, model, args, train_dataset):
        self.args = args
        self.model = model.cuda()
        self.ref_model = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.dataset = train_dataset
        if args.precompute_ref_log_probs:
            self.dataset = self._precompute(train_dataset)

    @torch.no_grad()
    def _precompute(self, dataset):
        rows = []
        for chosen, rejected in dataset:
            logps = [
                sequence_logps(self.ref_model(ids.cuda()), ids.cuda()).cpu()
                for ids in (chosen, rejected)
            ]
            rows.append((chosen, rejected, *logps))
        return rows

    def compute_loss(self, batch):
        chosen, rejected, ref_chosen, ref_rejected = (x.cuda() for x in batch)
        ids = torch.cat([chosen, rejected])
        logps = sequence_logps(self.model(ids), ids)
        policy_chosen, policy_rejected = logps.chunk(2)
        ratios = (policy_chosen - ref_chosen) - (policy_rejected - ref_rejected)
        return -F.logsigmoid(self.args.beta * ratios).mean()

    def train(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.lr)
        for epoch in range(self.args.epochs):
            for batch in self.dataset:
                loss = self.compute_loss(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(epoch, loss.item())


def main():
    torch.manual_seed(0)
    args = DPOConfig()
    dataset = [tuple(torch.randint(0, 4000, (2, args.batch_size, 48))) for _ in range(4)]
    DPOTrainer(Policy(), args, dataset).train()


if __name__ == "__main__":
    main()
