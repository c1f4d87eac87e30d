"""Translation from one random language into another."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from loop.module import Module


class Translation(Module):
    def __init__(self, vocab_size, width, heads, layers, max_len):
        super().__init__()
        self.source = nn.Embedding(vocab_size, width)
        self.target = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(max_len, width)
        options = {"batch_first": True, "dropout": 0.0, "norm_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.generator = nn.Linear(width, vocab_size)

    def places(self, tokens):
        return self.position(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, source, target):
        memory = self.source(source) + self.places(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(target) + self.places(target)
        length = target.shape[1]
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        return self.generator(x)

    def loss(self, batch):
        logits = self(batch["source"], batch["target"][:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["target"][:, 1:].flatten())
        return loss, logits

    def training_step(self, batch):
        loss, _ = self.loss(batch)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch):
        loss, logits = self.loss(batch)
        right = logits.argmax(-1) == batch["target"][:, 1:]
        return {"val_loss": loss, "accuracy": right.float().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-4, foreach=False)
