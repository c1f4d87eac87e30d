import torch
import torch.nn.functional as F
from torch import nn

PAD = 0


class Embeddings(nn.Module):
    def __init__(self, vocabulary, width, length=128):
        super().__init__()
        self.lut = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.position = nn.Embedding(length, width)

    def forward(self, ids):
        return self.lut(ids) + self.position.weight[: ids.shape[1]]


class Generator(nn.Module):
    def __init__(self, width, vocabulary):
        super().__init__()
        self.proj = nn.Linear(width, vocabulary)

    def forward(self, x):
        return F.log_softmax(self.proj(x), dim=-1)


class EncoderDecoder(nn.Module):
    def __init__(self, vocabulary, width=192, depth=2, heads=4):
        super().__init__()
        self.source, self.target = Embeddings(vocabulary, width), Embeddings(vocabulary, width)
        options = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, **options), depth, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(width, heads, **options), depth
        )
        self.generator = Generator(width, vocabulary)

    def forward(self, source, target):
        memory = self.encoder(self.source(source))
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.decoder(self.target(target), memory, tgt_mask=mask, tgt_is_causal=True)


class LabelSmoothing(nn.Module):
    def __init__(self, size, padding_idx, smoothing=0.0):
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.padding_idx = padding_idx
        self.confidence = 1.0 - smoothing
        self.smoothing = smoothing
        self.size = size
        self.true_dist = None

    def forward(self, x, target):
        true_dist = x.detach().clone()
        true_dist.fill_(self.smoothing / (self.size - 2))
        true_dist.scatter_(1, target.unsqueeze(1), self.confidence)
        true_dist[:, self.padding_idx] = 0
        true_dist.masked_fill_((target == self.padding_idx).unsqueeze(1), 0.0)
        self.true_dist = true_dist
        return self.criterion(x, true_dist.clone().detach())


class SimpleLossCompute:
    def __init__(self, generator, criterion):
        self.generator, self.criterion = generator, criterion

    def __call__(self, x, y, norm):
        x = self.generator(x)
        loss = self.criterion(x.reshape(-1, x.size(-1)), y.reshape(-1)) / norm
        return loss.item() * norm, loss


class Batch:
    def __init__(self, source, target):
        self.source = source.cuda()
        self.target, self.target_y = target[:, :-1].cuda(), target[:, 1:].cuda()
        self.tokens = self.target_y.numel()


def data(batches, size=24, length=33, vocabulary=12000):
    for _ in range(batches):
        yield Batch(*torch.randint(1, vocabulary, (2, size, length)))


def rate(step, width, warmup):
    step = max(step, 1)
    return width**-0.5 * min(step**-0.5, step * warmup**-1.5)


def run_epoch(batches, model, loss_compute, optimizer, scheduler):
    total = tokens = 0
    for batch in batches:
        out = model(batch.source, batch.target)
        loss, node = loss_compute(out, batch.target_y, batch.tokens)
        node.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        total += loss
        tokens += batch.tokens
        del node
    return total / tokens


def main():
    torch.manual_seed(0)
    vocabulary = 12000
    model = EncoderDecoder(vocabulary).cuda()
    criterion = LabelSmoothing(vocabulary, PAD, smoothing=0.1).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, 192, 400))
    compute = SimpleLossCompute(model.generator, criterion)
    for epoch in range(2):
        print(epoch, run_epoch(data(3), model, compute, optimizer, scheduler))


if __name__ == "__main__":
    main()
