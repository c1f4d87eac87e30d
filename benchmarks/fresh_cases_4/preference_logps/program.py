import torch
import torch.nn.functional as F
from torch import nn


class CausalLM(nn.Module):
    def __init__(self, vocabulary, width=128, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(depth)
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.lm_head(x)


def get_batch_logps(logits, labels, label_pad_token_id=-100):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != label_pad_token_id
    labels = labels.masked_fill(~loss_mask, 0)
    per_token_logps = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1), loss_mask.sum(-1)


class CustomORPOTrainer:
    def __init__(self, model, beta=0.1, ld_alpha=None):
        self.model = model
        self.beta, self.ld_alpha = beta, ld_alpha
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        self._stored_metrics = {"loss": [], "margin": []}

    def odds_ratio_loss(self, chosen, rejected):
        log_odds = (chosen - rejected) - (
            torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected))
        )
        return -chosen - self.beta * F.logsigmoid(log_odds)

    def concatenated_forward(self, batch):
        all_logits = self.model(batch["input_ids"]).to(torch.float32)
        all_logps, valid_length = get_batch_logps(all_logits, batch["labels"])
        return (all_logps / valid_length).chunk(2)

    def training_step(self, batch):
        batch = {name: value.cuda() for name, value in batch.items()}
        chosen, rejected = self.concatenated_forward(batch)
        loss = self.odds_ratio_loss(chosen, rejected).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self._stored_metrics["loss"].append(loss.item())
        self._stored_metrics["margin"].append((chosen - rejected).mean().item())


def collate(batch_size, length, vocabulary):
    input_ids = torch.randint(0, vocabulary, (2 * batch_size, length))
    labels = input_ids.clone()
    labels[:, : length // 4] = -100
    return {"input_ids": input_ids, "labels": labels}


def main():
    torch.manual_seed(0)
    vocabulary = 16000
    trainer = CustomORPOTrainer(CausalLM(vocabulary).cuda())
    for _ in range(4):
        trainer.training_step(collate(4, 192, vocabulary))
    print(trainer._stored_metrics)


if __name__ == "__main__":
    main()
