"""Options of the program; they are in flags.txt, one in a line."""

import argparse


def parse(path="flags.txt"):
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("--batchSize", type=int, default=64, help="input batch size")
    parser.add_argument("--imageSize", type=int, default=64, help="height and width of images")
    parser.add_argument("--nz", type=int, default=100, help="size of the latent z vector")
    parser.add_argument("--ngf", type=int, default=64)
    parser.add_argument("--ndf", type=int, default=64)
    parser.add_argument("--niter", type=int, default=25, help="number of epochs to train for")
    parser.add_argument("--steps", type=int, default=3, help="batches of an epoch")
    parser.add_argument("--lr", type=float, default=0.0002)
    parser.add_argument("--beta1", type=float, default=0.5)
    parser.add_argument("--samples", type=int, default=16, help="images drawn after an epoch")
    parser.add_argument("--manualSeed", type=int, default=0)
    return parser.parse_args([f"@{path}"])
