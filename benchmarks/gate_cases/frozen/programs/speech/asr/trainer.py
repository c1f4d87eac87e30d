"""Epochs, and what is reported of them."""

import torch


class Reporter:
    def __init__(self):
        self.stats = []

    def register(self, stats):
        self.stats.append({name: float(value) for name, value in stats.items()})

    def message(self, key):
        return f"{key} {sum(row[key] for row in self.stats) / len(self.stats):.4f}"


class EMA:
    """An average of the parameters, kept on the host."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def step(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.cpu(), 1 - self.decay)


class Trainer:
    def __init__(self, model, optimizer, conf, device):
        self.model = model
        self.optimizer = optimizer
        self.conf = conf
        self.device = device
        self.ema = EMA(model, conf["ema_decay"])

    def to_device(self, batch):
        return [part.to(self.device, non_blocking=True) for part in batch]

    def train_one_epoch(self, iterator):
        reporter = Reporter()
        accum_grad = self.conf["accum_grad"]
        self.model.train()
        for iiter, batch in enumerate(iterator, 1):
            speech, speech_lengths, text = self.to_device(batch)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.conf["use_amp"]):
                loss, stats = self.model(speech, speech_lengths, text)
            reporter.register(stats)
            (loss / accum_grad).backward()
            if iiter % accum_grad == 0:
                torch.nn.utils.clip_grad_norm_(
                    self.model.parameters(),
                    max_norm=self.conf["grad_clip"],
                    foreach=False,
                )
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.ema.step(self.model)
        return reporter

    @torch.no_grad()
    def validate_one_epoch(self, iterator):
        reporter = Reporter()
        self.model.eval()
        for batch in iterator:
            speech, speech_lengths, text = self.to_device(batch)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.conf["use_amp"]):
                _, stats = self.model(speech, speech_lengths, text)
            reporter.register(stats)
        return reporter
