"""LoRA finetuning recipe for one device."""

from types import SimpleNamespace

import torch
import yaml

from tune.data import InstructDataset, batches
from tune.lora import get_adapter_params, set_trainable_params
from tune.loss import CEWithChunkedOutputLoss
from tune.modules import Decoder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def parse(path):
    def convert(value):
        if isinstance(value, dict):
            return SimpleNamespace(**{key: convert(child) for key, child in value.items()})
        return value

    with open(path) as file:
        return convert(yaml.safe_load(file))


class LoRAFinetuneRecipeSingleDevice:
    def __init__(self, cfg):
        self._device = torch.device("cuda")
        self._dtype = DTYPES[cfg.dtype]
        self.cfg = cfg
        self.global_step = 0

    def setup(self):
        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        self._model = self._setup_model(cfg.enable_activation_checkpointing)
        self._optimizer = torch.optim.AdamW(
            [p for p in self._model.parameters() if p.requires_grad],
            lr=cfg.optimizer.lr,
            weight_decay=cfg.optimizer.weight_decay,
        )
        self._loss_fn = CEWithChunkedOutputLoss(cfg.loss.num_output_chunks)
        self._model.set_num_output_chunks(cfg.loss.num_output_chunks)
        self._dataset = InstructDataset(
            cfg.model.vocab_size,
            cfg.dataset.max_seq_len,
            cfg.batch_size * cfg.max_steps_per_epoch,
            cfg.dataset.seed,
        )

    def _setup_model(self, enable_activation_checkpointing):
        model = Decoder(self.cfg.model).to(self._device, self._dtype)
        self.adapter_params = get_adapter_params(model)
        set_trainable_params(model, self.adapter_params)
        model.activation_checkpointing = enable_activation_checkpointing
        return model

    def train(self):
        for epoch in range(self.cfg.epochs):
            self._model.train()
            for batch in batches(self._dataset, self.cfg.batch_size):
                batch = {name: value.to(self._device) for name, value in batch.items()}
                labels = batch.pop("labels")
                logits = self._model(batch["tokens"])
                # Shift labels to compute loss
                labels = torch.hstack((labels[..., 1:], torch.full_like(labels[..., :1], -100)))
                loss = self._loss_fn(logits, labels)
                # free logits otherwise it peaks backward memory
                del logits
                loss.backward()
                if self.cfg.clip_grad_norm is not None:
                    torch.nn.utils.clip_grad_norm_(
                        self._model.parameters(), max_norm=self.cfg.clip_grad_norm
                    )
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self.global_step += 1
                if self.global_step % self.cfg.log_every_n_steps == 0:
                    print(f"{epoch + 1}|{self.global_step}|Loss: {loss.detach().item():.4f}")

    def save_checkpoint(self):
        state = {name: p.detach().cpu() for name, p in self.adapter_params.items()}
        print(f"{len(state)} adapter tensors for {self.cfg.output_dir}")


def recipe_main():
    recipe = LoRAFinetuneRecipeSingleDevice(parse("configs/lora_single_device.yaml"))
    recipe.setup()
    recipe.train()
    recipe.save_checkpoint()


if __name__ == "__main__":
    recipe_main()
