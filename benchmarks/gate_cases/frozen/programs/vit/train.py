"""Trains a vision transformer on random images."""

import torch
import torch.nn.functional as F
import yaml

from vit.data import Mixup, create_loader
from vit.ema import ModelEmaV2
from vit.model import VisionTransformer
from vit.scaler import NativeScaler


def create_model(args, device):
    options = dict(args["model"])
    grad_checkpointing = options.pop("grad_checkpointing")
    model = VisionTransformer(**options)
    if grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    return model.to(device)


def batches_of(args, kind, seed):
    data = args["data"]
    size = data["batch_size"]
    if kind == "val":
        size *= data["validation_batch_size_multiplier"]
    count = data[f"{kind}_batches"]
    return create_loader(args["model"]["img_size"], args["model"]["num_classes"], size, count, seed)


def train_one_epoch(model, loader, optimizer, mixup_fn, loss_scaler, model_ema, args, device):
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        input, target = mixup_fn(input.to(device), target.to(device))
        with torch.autocast("cuda", dtype=getattr(torch, args["amp_dtype"])):
            output = model(input)
            loss = F.cross_entropy(output, target)
        optimizer.zero_grad()
        loss_scaler(
            loss,
            optimizer,
            clip_grad=args["opt"]["clip_grad"],
            parameters=model.parameters(),
        )
        if model_ema is not None:
            model_ema.update(model)
        if batch_idx % args["log_interval"] == 0:
            print(f"train {batch_idx}: loss {loss.item():.3f}")


@torch.inference_mode()
def validate(model, loader, args, device):
    model.eval()
    correct, total = 0.0, 0
    for input, target in loader:
        input, target = input.to(device), target.to(device)
        with torch.autocast("cuda", dtype=getattr(torch, args["amp_dtype"])):
            output = model(input)
        correct += (output.argmax(1) == target).sum().item()
        total += len(target)
    return correct / total


def main():
    with open("configs/vit_tiny.yaml") as file:
        args = yaml.safe_load(file)
    torch.manual_seed(42)
    device = torch.device("cuda")
    model = create_model(args, device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=args["opt"]["lr"],
        weight_decay=args["opt"]["weight_decay"],
        foreach=False,
    )
    model_ema = ModelEmaV2(model, decay=args["model_ema_decay"]) if args["model_ema"] else None
    mixup_fn = Mixup(args["mixup"], args["model"]["num_classes"])
    train_one_epoch(
        model,
        batches_of(args, "train", 1),
        optimizer,
        mixup_fn,
        NativeScaler(),
        model_ema,
        args,
        device,
    )
    top1 = validate(model, batches_of(args, "val", 2), args, device)
    print(f"top1 {top1:.3f}")


if __name__ == "__main__":
    main()
