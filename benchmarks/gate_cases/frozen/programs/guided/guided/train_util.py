"""The training loop."""

import copy

import torch

from guided.nn import update_ema


class TrainLoop:
    def __init__(self, model, diffusion, data, args, device):
        self.model = model
        self.diffusion = diffusion
        self.data = data
        self.device = device
        self.batch_size = args.batch_size
        self.microbatch = args.microbatch if args.microbatch > 0 else args.batch_size
        self.log_interval = args.log_interval
        self.iterations = args.iterations
        self.ema_rate = [float(x) for x in args.ema_rate.split(",")]
        self.params = list(model.parameters())
        self.opt = torch.optim.AdamW(self.params, lr=args.lr, weight_decay=0.0, foreach=False)
        self.ema_params = [copy.deepcopy(self.params) for _ in self.ema_rate]
        self.step = 0

    def run_loop(self):
        while self.step < self.iterations:
            self.run_step(next(self.data))
            self.step += 1

    def run_step(self, batch):
        self.forward_backward(batch)
        self.opt.step()
        self._update_ema()

    def forward_backward(self, batch):
        self.opt.zero_grad()
        for i in range(0, batch.shape[0], self.microbatch):
            micro = batch[i : i + self.microbatch].to(self.device)
            t = torch.randint(self.diffusion.num_timesteps, (len(micro),), device=self.device)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                losses = self.diffusion.training_losses(self.model, micro, t)
            loss = losses["loss"].mean()
            loss.backward()
            if self.step % self.log_interval == 0:
                print(f"step {self.step} loss {loss.item():.4f}")

    @torch.no_grad()
    def _update_ema(self):
        for rate, params in zip(self.ema_rate, self.ema_params):
            update_ema(params, self.params, rate=rate)
