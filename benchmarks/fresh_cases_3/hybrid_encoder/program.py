import torch
import torch.nn.functional as F
from torch import nn


class EncoderLayer(nn.Module):
    def __init__(self, d_model=256, nhead=8, dim_feedforward=1024):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)

    @staticmethod
    def with_pos_embed(tensor, pos):
        return tensor if pos is None else tensor + pos

    def forward(self, src, pos=None):
        residual = src
        q = k = self.with_pos_embed(src, pos)
        src, _ = self.self_attn(q, k, value=src)
        src = self.norm1(residual + src)
        residual = src
        src = self.linear2(F.gelu(self.linear1(src)))
        return self.norm2(residual + src)


class HybridEncoder(nn.Module):
    """A convolutional backbone, and self-attention over its coarsest map."""

    def __init__(self, hidden=256, layers=2):
        super().__init__()
        widths = [3, 32, 64, 128, hidden]
        self.backbone = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU())
                for i, o in zip(widths, widths[1:])
            )
        )
        self.encoder = nn.ModuleList(EncoderLayer(hidden) for _ in range(layers))
        self.pos_embeds = {}

    def position_embedding(self, w, h, dim, device, temperature=10000.0):
        if (w, h) not in self.pos_embeds:
            grid_w, grid_h = torch.meshgrid(torch.arange(w), torch.arange(h), indexing="ij")
            omega = 1.0 / temperature ** (torch.arange(dim // 4) / (dim // 4))
            out_w = grid_w.flatten()[:, None] * omega[None]
            out_h = grid_h.flatten()[:, None] * omega[None]
            table = torch.cat([out_w.sin(), out_w.cos(), out_h.sin(), out_h.cos()], dim=1)
            self.pos_embeds[w, h] = table[None].to(device)
        return self.pos_embeds[w, h]

    def forward(self, images):
        features = self.backbone(images)
        _, c, h, w = features.shape
        src = features.flatten(2).permute(0, 2, 1)
        pos = self.position_embedding(w, h, c, src.device)
        for layer in self.encoder:
            src = layer(src, pos)
        return src


class Detector(nn.Module):
    def __init__(self, classes=80, hidden=256):
        super().__init__()
        self.encoder = HybridEncoder(hidden)
        self.score_head = nn.Linear(hidden, classes)
        self.box_head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def forward(self, images):
        memory = self.encoder(images)
        return self.score_head(memory), self.box_head(memory).sigmoid()


class SyntheticDetection(torch.utils.data.Dataset):
    def __init__(self, count, size=512, anchors=1024):
        self.count, self.size, self.anchors = count, size, anchors

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        image = torch.rand(3, self.size, self.size)
        labels = torch.zeros(self.anchors, 80)
        labels[torch.randint(0, self.anchors, (8,)), torch.randint(0, 80, (8,))] = 1
        return image, labels, torch.rand(self.anchors, 4)


def criterion(logits, boxes, labels, targets):
    classification = F.binary_cross_entropy_with_logits(logits, labels)
    weight = labels.amax(-1, keepdim=True)
    return classification + ((boxes - targets).abs() * weight).sum() / weight.sum().clamp(min=1)


def train_one_epoch(model, loader, optimizer, epoch):
    model.train()
    for images, labels, targets in loader:
        images, labels, targets = images.cuda(), labels.cuda(), targets.cuda()
        loss = criterion(*model(images), labels, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    print(epoch, loss.item())


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(SyntheticDetection(8), batch_size=4)
    model = Detector().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for epoch in range(2):
        train_one_epoch(model, loader, optimizer, epoch)
