"""Masked language modelling with a trainer of our own, evaluated with a metric."""

import torch
from transformers import BertConfig, BertForMaskedLM


def nested_concat(tensors, new):
    if isinstance(tensors, (list, tuple)):
        return type(tensors)(nested_concat(t, n) for t, n in zip(tensors, new))
    return torch.cat((tensors, new), dim=0)


def accuracy(predictions, labels):
    chosen = labels != -100
    return (predictions.argmax(-1)[chosen] == labels[chosen]).float().mean().item()


class Trainer:
    def __init__(self, model, compute_metrics, lr=1e-4):
        self.model = model
        self.compute_metrics = compute_metrics
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def prediction_step(self, inputs, labels):
        with torch.no_grad():
            output = self.model(input_ids=inputs, labels=labels)
        return output.loss.detach(), output.logits.detach()

    def evaluate(self, loader):
        self.model.eval()
        preds_host = labels_host = None
        losses = []
        for inputs, labels in loader:
            inputs, labels = inputs.cuda(), labels.cuda()
            loss, logits = self.prediction_step(inputs, labels)
            losses.append(loss.item())
            preds_host = logits if preds_host is None else nested_concat(preds_host, logits)
            labels_host = labels if labels_host is None else nested_concat(labels_host, labels)
        score = self.compute_metrics(preds_host, labels_host)
        return sum(losses) / len(losses), score

    def train(self, loader):
        self.model.train()
        for inputs, labels in loader:
            loss = self.model(input_ids=inputs.cuda(), labels=labels.cuda()).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()


def batches(count, size=8, length=64, vocabulary=8000):
    for _ in range(count):
        tokens = torch.randint(5, vocabulary, (size, length))
        masked = torch.rand(size, length) < 0.15
        yield tokens.masked_fill(masked, 4), tokens.masked_fill(~masked, -100)


def main():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=8000,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
    )
    trainer = Trainer(BertForMaskedLM(config).cuda(), accuracy)
    for epoch in range(2):
        trainer.train(batches(3))
        print(epoch, trainer.evaluate(batches(16)))


if __name__ == "__main__":
    main()
