"""The recogniser and its loss."""

import torch.nn as nn
import torch.nn.functional as F

from asr.encoder import TransformerEncoder
from asr.specaug import SpecAug


class ASRModel(nn.Module):
    def __init__(self, conf):
        super().__init__()
        self.specaug = SpecAug(**conf["specaug_conf"]) if conf["specaug"] else None
        self.encoder = TransformerEncoder(conf["input_size"], **conf["encoder_conf"])
        self.decoder = nn.Linear(conf["encoder_conf"]["output_size"], conf["vocab_size"])

    def forward(self, speech, speech_lengths, text):
        if self.specaug is not None and self.training:
            speech = self.specaug(speech)
        encoder_out = self.encoder(speech, speech_lengths)
        logits = self.decoder(encoder_out)[:, : text.size(1)]
        loss = F.cross_entropy(logits.flatten(0, 1), text.flatten(), ignore_index=-1)
        stats = {
            "loss": loss.detach(),
            "acc": (logits.detach().argmax(-1) == text).float().mean(),
        }
        return loss, stats
