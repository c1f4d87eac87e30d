"""Trains a diffusion model on random images, and samples from it."""

import torch

from guided.gaussian_diffusion import GaussianDiffusion
from guided.script_util import create_argparser, flags_of
from guided.train_util import TrainLoop
from guided.unet import UNetModel


def load_data(batch_size, image_size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.rand(batch_size, 3, image_size, image_size, generator=generator) * 2 - 1


def main():
    args = create_argparser().parse_args(flags_of("flags.sh"))
    torch.manual_seed(0)
    device = torch.device("cuda")
    model = UNetModel(args).to(device)
    diffusion = GaussianDiffusion(args.diffusion_steps, device)
    data = load_data(args.batch_size, args.image_size)
    loop = TrainLoop(model, diffusion, data, args, device)
    loop.run_loop()
    del loop
    model.eval()
    shape = (args.num_samples, 3, args.image_size, args.image_size)
    sample = diffusion.p_sample_loop(model, shape, args.sample_steps, device)
    print(sample.clamp(-1, 1).cpu().shape)


if __name__ == "__main__":
    main()
