"""Runs a task."""

import torch


class Trainer:
    def __init__(
        self,
        max_epochs=1,
        accumulate_grad_batches=1,
        gradient_clip_val=None,
        precision="32",
        move_metrics_to_cpu=False,
        log_every_n_steps=10,
        callbacks=(),
    ):
        self.max_epochs = max_epochs
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.precision = precision
        self.move_metrics_to_cpu = move_metrics_to_cpu
        self.log_every_n_steps = log_every_n_steps
        self.callbacks = list(callbacks)
        self.device = torch.device("cuda")
        self.global_step = 0

    def metric(self, value):
        value = value.detach()
        return value.cpu() if self.move_metrics_to_cpu else value

    def call(self, hook, *args):
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    def forward_context(self):
        return torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.precision == "bf16-mixed")

    def transfer_batch_to_device(self, batch):
        return {name: value.to(self.device) for name, value in batch.items()}

    def fit(self, module, datamodule):
        module.trainer = self
        module.to(self.device)
        optimizer = module.configure_optimizers()
        self.call("on_fit_start", module)
        for _ in range(self.max_epochs):
            self.run_training_epoch(module, datamodule.train_dataloader(), optimizer)
            self.run_evaluation(module, datamodule.val_dataloader())

    def run_training_epoch(self, module, loader, optimizer):
        module.train()
        for batch_idx, batch in enumerate(loader):
            batch = self.transfer_batch_to_device(batch)
            with self.forward_context():
                outputs = module.training_step(batch)
            loss = outputs["loss"] / self.accumulate_grad_batches
            loss.backward()
            # the hooks get the loss alone, without its graph
            outputs = {"loss": outputs["loss"].detach()}
            if (batch_idx + 1) % self.accumulate_grad_batches == 0:
                self.optimizer_step(module, optimizer)
            self.call("on_train_batch_end", module, outputs)

    def optimizer_step(self, module, optimizer):
        if self.gradient_clip_val is not None:
            torch.nn.utils.clip_grad_norm_(
                module.parameters(), self.gradient_clip_val, foreach=False
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.global_step += 1

    @torch.no_grad()
    def run_evaluation(self, module, loader):
        module.eval()
        losses = []
        for batch in loader:
            batch = self.transfer_batch_to_device(batch)
            with self.forward_context():
                output = module.validation_step(batch)
            losses.append(output["val_loss"])
            self.call("on_validation_batch_end", module, output)
        module.log("val_loss", torch.stack(losses).mean())
        self.call("on_validation_end", module)
