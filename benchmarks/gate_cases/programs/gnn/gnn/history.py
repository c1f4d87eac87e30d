"""Embeddings of the last epoch, of all nodes."""

import torch


class History(torch.nn.Module):
    def __init__(self, num_embeddings, embedding_dim, device="cpu"):
        super().__init__()
        self.emb = torch.zeros(num_embeddings, embedding_dim, device=device)

    @torch.no_grad()
    def push(self, x, n_id):
        self.emb[n_id.to(self.emb.device)] = x.to(self.emb.device)

    @torch.no_grad()
    def pull(self, n_id):
        return self.emb[n_id.to(self.emb.device)].to(n_id.device)
