import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class Utterances(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(393, 401, (count,), generator=generator)
        self.features = [torch.randn(int(n), 80, generator=generator) for n in lengths]
        self.texts = [torch.randint(1, 32, (int(n) // 10,), generator=generator) for n in lengths]

    def __len__(self):
        return len(self.features)

    def __getitem__(self, at):
        return self.features[at], self.texts[at]


def collate(batch):
    features, texts = zip(*batch)
    lengths = torch.tensor([len(f) for f in features])
    text_lengths = torch.tensor([len(t) for t in texts])
    return (
        pad_sequence(features, batch_first=True),
        lengths,
        pad_sequence(texts, batch_first=True),
        text_lengths,
    )


class ConvSubsampling(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU()
        )
        self.out = nn.Linear(32 * 20, width)

    def forward(self, x, lengths):
        x = self.conv(x[:, None])
        x = self.out(x.transpose(1, 2).flatten(2))
        return x, ((lengths + 1) // 2 + 1) // 2


class Recognizer(nn.Module):
    def __init__(self, width=256, tokens=32):
        super().__init__()
        self.subsampling = ConvSubsampling(width)
        self.rnn = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, tokens)

    def forward(self, x, lengths):
        x, lengths = self.subsampling(x, lengths)
        x, _ = self.rnn(x)
        return self.head(x), lengths


class Trainer:
    def __init__(self, model):
        self.model = model.cuda()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.ctc = nn.CTCLoss(zero_infinity=True)
        self.history = []

    def loss(self, batch):
        features, lengths, texts, text_lengths = batch
        logits, lengths = self.model(features.cuda(), lengths)
        log_probs = logits.log_softmax(-1).transpose(0, 1)
        return self.ctc(log_probs, texts.cuda(), lengths, text_lengths)

    def epoch(self, loader):
        self.model.train()
        for batch in loader:
            loss = self.loss(batch)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.optimizer.step()
            self.history.append(loss.item())

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        losses = [self.loss(batch).item() for batch in loader]
        return sum(losses) / len(losses)


def main():
    torch.manual_seed(0)
    training = torch.utils.data.DataLoader(Utterances(48, 0), batch_size=12, collate_fn=collate)
    validation = torch.utils.data.DataLoader(Utterances(12, 1), batch_size=12, collate_fn=collate)
    trainer = Trainer(Recognizer())
    for epoch in range(2):
        trainer.epoch(training)
        print(epoch, trainer.history[-1], trainer.evaluate(validation))


if __name__ == "__main__":
    main()
