"""Flags, and what is made of them."""

import argparse
import re
import shlex


def str2bool(v):
    if v.lower() in ("yes", "true", "1"):
        return True
    if v.lower() in ("no", "false", "0"):
        return False
    raise argparse.ArgumentTypeError("boolean value expected")


def ints(text):
    return tuple(int(part) for part in text.split(","))


def create_argparser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--image_size", type=int, default=32)
    parser.add_argument("--num_channels", type=int, default=32)
    parser.add_argument("--num_res_blocks", type=int, default=1)
    parser.add_argument("--channel_mult", type=ints, default=(1, 2))
    parser.add_argument("--attention_resolutions", type=ints, default=(8,))
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--use_checkpoint", type=str2bool, default=False)
    parser.add_argument("--diffusion_steps", type=int, default=100)
    parser.add_argument("--noise_schedule", default="linear")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=-1)
    parser.add_argument("--ema_rate", default="0.9999")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--log_interval", type=int, default=1)
    parser.add_argument("--num_samples", type=int, default=4)
    parser.add_argument("--sample_steps", type=int, default=2)
    return parser


def flags_of(path):
    """The values of the variables of a shell file that end in _FLAGS."""
    values = {}
    for line in open(path):
        found = re.match(r'(\w+_FLAGS)="(.*)"', line)
        if found:
            name, text = found.groups()
            values[name] = text.replace(f"${name}", values.get(name, ""))
    return [word for text in values.values() for word in shlex.split(text)]
