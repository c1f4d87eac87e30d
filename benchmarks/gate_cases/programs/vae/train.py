"""Trains a variational autoencoder on random digits."""

import json

import torch

from vae.loss import loss_function
from vae.model import VAE
from vae.visual import Gallery

device = torch.device("cuda")


def loader(cfg, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, cfg["channels"], cfg["image_size"], cfg["image_size"])
    for _ in range(cfg["batches"]):
        yield torch.rand(shape, generator=generator)


def train(model, optimizer, cfg, epoch):
    model.train()
    train_loss = 0.0
    for batch_idx, data in enumerate(loader(cfg, cfg["batch_size"], epoch)):
        data = data.to(device)
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar, cfg["beta"])
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % cfg["log_interval"] == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}] Loss: {loss.item() / len(data):.4f}")
    return train_loss


def test(model, cfg, epoch, gallery):
    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for i, data in enumerate(loader(cfg, cfg["test_batch_size"], 100 + epoch)):
            data = data.to(device)
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar, cfg["beta"]).item()
            if i == 0:
                gallery.add(data, recon_batch[: len(data)])
    print(f"====> Test set loss: {test_loss:.1f}")


def main():
    with open("config.json") as file:
        cfg = json.load(file)
    torch.manual_seed(cfg["seed"])
    pixels = cfg["channels"] * cfg["image_size"] ** 2
    model = VAE(pixels, cfg["hidden"], cfg["latent"], cfg["num_importance_samples"]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"], foreach=False)
    gallery = Gallery()
    for epoch in range(1, cfg["epochs"] + 1):
        train(model, optimizer, cfg, epoch)
        test(model, cfg, epoch, gallery)
    with torch.no_grad():
        drawn = model.decode(torch.randn(64, cfg["latent"], device=device)).cpu()
    print(tuple(drawn.shape))
    gallery.save()


if __name__ == "__main__":
    main()
