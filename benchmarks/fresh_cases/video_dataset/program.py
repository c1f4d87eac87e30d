import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TextEncoder(nn.Module):
    def __init__(self, vocabulary=24_000, width=768, depth=4):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(depth)
        )

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class VideoEncoder(nn.Module):
    def __init__(self, channels=32, latent=8):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, channels, 3, padding=1),
            nn.SiLU(),
            nn.Conv3d(channels, channels, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv3d(channels, latent, 3, stride=2, padding=1),
        )

    def forward(self, video):
        return self.layers(video)


@torch.no_grad()
def process_captions(text_encoder, captions):
    embeddings = []
    for (ids,) in DataLoader(TensorDataset(captions), batch_size=16):
        embeddings.append(text_encoder(ids.cuda()).cpu())
    return torch.cat(embeddings)


@torch.no_grad()
def process_videos(video_encoder, videos):
    latents = []
    for (video,) in DataLoader(TensorDataset(videos), batch_size=8):
        latents.append(video_encoder(video.cuda()).cpu())
    return torch.cat(latents)


def process_dataset(captions, videos):
    text_encoder = TextEncoder().cuda().eval()
    embeddings = process_captions(text_encoder, captions)
    video_encoder = VideoEncoder().cuda().eval()
    latents = process_videos(video_encoder, videos)
    return TensorDataset(embeddings, latents.flatten(1))


def train(dataset):
    model = nn.Linear(768, dataset[0][1].numel()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for embedding, latent in DataLoader(dataset, batch_size=2, shuffle=True):
        optimizer.zero_grad()
        loss = F.mse_loss(model(embedding.cuda()), latent.cuda())
        loss.backward()
        optimizer.step()
    return loss.item()


captions = torch.randint(0, 24_000, (8, 64))
videos = torch.rand(8, 3, 8, 128, 128)
print(train(process_dataset(captions, videos)))
