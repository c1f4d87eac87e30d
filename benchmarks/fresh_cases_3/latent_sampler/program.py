import torch
import torch.nn.functional as F
from torch import nn


class ResBlock(nn.Module):
    def __init__(self, width, embed):
        super().__init__()
        self.conv1 = nn.Conv3d(width, width, 3, padding=1)
        self.conv2 = nn.Conv3d(width, width, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.embed = nn.Linear(embed, width)

    def forward(self, x, embedding):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.embed(embedding)[:, :, None, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class VideoDenoiser(nn.Module):
    def __init__(self, channels=4, width=16, depth=2, embed=64):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, embed), nn.SiLU(), nn.Linear(embed, embed))
        self.inward = nn.Conv3d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(width, embed) for _ in range(depth))
        self.outward = nn.Conv3d(width, channels, 3, padding=1)

    def forward(self, x, t):
        embedding = self.embed(t.float()[:, None] / 1000)
        h = self.inward(x)
        for block in self.blocks:
            h = block(h, embedding)
        return self.outward(h)


class LatentDiffusion(nn.Module):
    def __init__(self, steps=1000):
        super().__init__()
        self.model = VideoDenoiser()
        self.decoder = nn.Conv3d(4, 3, 1)
        betas = torch.linspace(1e-4, 2e-2, steps)
        self.num_timesteps = steps
        self.register_buffer("alphas_cumprod", (1 - betas).cumprod(0))

    def apply_model(self, x, t):
        return self.model(x, t)

    def decode_first_stage(self, z):
        return self.decoder(z)


class DDIMSampler:
    def __init__(self, model):
        self.model = model
        self.ddpm_num_timesteps = model.num_timesteps

    def make_schedule(self, steps):
        self.ddim_timesteps = list(
            range(1, self.ddpm_num_timesteps, self.ddpm_num_timesteps // steps)
        )
        self.ddim_alphas = [float(self.model.alphas_cumprod[t]) for t in self.ddim_timesteps]
        self.ddim_alphas_prev = [1.0, *self.ddim_alphas[:-1]]

    @torch.no_grad()
    def sample(self, steps, shape, img_callback=None, log_every_t=1):
        self.make_schedule(steps)
        return self.ddim_sampling(shape, img_callback, log_every_t)

    @torch.no_grad()
    def ddim_sampling(self, shape, img_callback, log_every_t):
        img = torch.randn(shape, device="cuda")
        intermediates = {"x_inter": [img], "pred_x0": [img]}
        total_steps = len(self.ddim_timesteps)
        for i, step in enumerate(reversed(self.ddim_timesteps)):
            index = total_steps - i - 1
            ts = torch.full((shape[0],), step, device="cuda", dtype=torch.long)
            img, pred_x0 = self.p_sample_ddim(img, ts, index)
            if img_callback:
                img_callback(pred_x0, i)
            if index % log_every_t == 0 or index == total_steps - 1:
                intermediates["x_inter"].append(img)
                intermediates["pred_x0"].append(pred_x0)
        return img, intermediates

    @torch.no_grad()
    def p_sample_ddim(self, x, t, index):
        e_t = self.model.apply_model(x, t)
        a_t, a_prev = self.ddim_alphas[index], self.ddim_alphas_prev[index]
        pred_x0 = (x - (1 - a_t) ** 0.5 * e_t) / a_t**0.5
        dir_xt = (1 - a_prev) ** 0.5 * e_t
        return a_prev**0.5 * pred_x0 + dir_xt, pred_x0


def main(clips=2, steps=20):
    torch.manual_seed(0)
    model = LatentDiffusion().cuda().eval()
    sampler = DDIMSampler(model)
    for clip in range(clips):
        samples, _ = sampler.sample(steps, shape=(1, 4, 16, 64, 128))
        with torch.no_grad():
            video = model.decode_first_stage(samples).clamp(-1, 1).cpu()
        print(clip, tuple(video.shape))


if __name__ == "__main__":
    main()
