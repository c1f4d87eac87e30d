"""Trains a recogniser on random features."""

import torch
import yaml

from asr.data import CommonCollateFn, NumElementsBatchSampler, Utterances
from asr.model import ASRModel
from asr.trainer import Trainer


def build_iterator(conf, batch_bins, seed):
    data = Utterances(conf["num_utterances"], conf["input_size"], conf["vocab_size"], seed)
    sampler = NumElementsBatchSampler(data.lengths, batch_bins, sort=conf["sort_in_batch"])
    collate = CommonCollateFn(multiple=conf["pad_to_multiple"])
    for batch in sampler:
        yield collate([data.features[i] for i in batch], [data.targets[i] for i in batch])


def main():
    with open("conf/train_asr.yaml") as file:
        conf = yaml.safe_load(file)
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = ASRModel(conf).to(device)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False, **conf["optim_conf"])
    trainer = Trainer(model, optimizer, conf, device)
    for epoch in range(1, conf["max_epoch"] + 1):
        train = trainer.train_one_epoch(build_iterator(conf, conf["batch_bins"], 1))
        valid = trainer.validate_one_epoch(build_iterator(conf, conf["valid_batch_bins"], 2))
        print(f"{epoch}epoch: [train] {train.message('loss')}, [valid] {valid.message('acc')}")


if __name__ == "__main__":
    main()
