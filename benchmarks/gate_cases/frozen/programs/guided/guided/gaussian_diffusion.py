"""The noise: how it is added, and how it is taken away."""

import torch


class GaussianDiffusion:
    def __init__(self, steps, device):
        self.betas = torch.linspace(1e-4, 0.02, steps, device=device)
        self.alphas_cumprod = torch.cumprod(1.0 - self.betas, dim=0)
        self.num_timesteps = steps

    def q_sample(self, x_start, t, noise):
        kept = self.alphas_cumprod[t][:, None, None, None]
        return kept.sqrt() * x_start + (1 - kept).sqrt() * noise

    def p_mean(self, model, x, t):
        eps = model(x, t)
        beta = self.betas[t][:, None, None, None]
        kept = self.alphas_cumprod[t][:, None, None, None]
        return (x - beta / (1 - kept).sqrt() * eps) / (1 - beta).sqrt()

    def p_sample_loop(self, model, shape, steps, device):
        img = torch.randn(*shape, device=device)
        for i in reversed(range(steps)):
            t = torch.full((shape[0],), i, device=device)
            with torch.no_grad():
                img = self.p_mean(model, img, t)
        return img

    def training_losses(self, model, x_start, t):
        noise = torch.randn_like(x_start)
        x_t = self.q_sample(x_start, t, noise)
        terms = {}
        model_output = model(x_t, t)
        terms["mse"] = ((noise - model_output) ** 2).mean((1, 2, 3))
        terms["loss"] = terms["mse"]
        return terms
