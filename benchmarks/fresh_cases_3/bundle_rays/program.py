import torch
import torch.nn.functional as F
from torch import nn


class Cameras:
    def __init__(self, count, height, width):
        self.height, self.width = height, width
        self.poses = torch.eye(3, 4).repeat(count, 1, 1).cuda()
        focal = 1.2 * width
        self.intrinsics = torch.tensor([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]])
        self.intrinsics = self.intrinsics.repeat(count, 1, 1).cuda()

    def __len__(self):
        return len(self.poses)


def to_homogeneous(x):
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)


def image_to_camera(x, intrinsics):
    return x @ intrinsics.inverse().transpose(-1, -2)


def camera_to_world(x, pose):
    return to_homogeneous(x) @ pose.transpose(-1, -2)


def get_center_and_ray(cameras, pose):
    """Origins and directions of all rays, (views, height x width, 3) each."""
    y = torch.arange(cameras.height, dtype=torch.float32, device="cuda") + 0.5
    x = torch.arange(cameras.width, dtype=torch.float32, device="cuda") + 0.5
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    grid = torch.stack([grid_x, grid_y], dim=-1).view(-1, 2).repeat(len(cameras), 1, 1)
    points = image_to_camera(to_homogeneous(grid), cameras.intrinsics)
    points = camera_to_world(points, pose)
    center = camera_to_world(torch.zeros_like(points), pose)
    return center, points - center


class RadianceField(nn.Module):
    def __init__(self, width=128, bands=6):
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(bands))
        self.net = nn.Sequential(
            nn.Linear(3 + 6 * bands, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.out = nn.Linear(width, 4)

    def forward(self, points):
        angles = (points[..., None, :] * self.frequencies[:, None]).flatten(-2)
        encoded = torch.cat([points, angles.sin(), angles.cos()], dim=-1)
        out = self.out(self.net(encoded))
        return out[..., :3].sigmoid(), F.softplus(out[..., 3])


class Graph(nn.Module):
    def __init__(self, cameras, samples=16, rays=512):
        super().__init__()
        self.cameras, self.samples, self.rays = cameras, samples, rays
        self.se3 = nn.Embedding(len(cameras), 3)
        nn.init.zeros_(self.se3.weight)
        self.field = RadianceField()

    def get_pose(self):
        pose = self.cameras.poses.clone()
        return torch.cat([pose[..., :3], pose[..., 3:] + self.se3.weight[..., None]], dim=-1)

    def render(self, pose, ray_index):
        center, ray = get_center_and_ray(self.cameras, pose)
        center, ray = center[:, ray_index], ray[:, ray_index]
        depth = torch.linspace(0.5, 4.0, self.samples, device="cuda")
        points = center[..., None, :] + ray[..., None, :] * depth[:, None]
        colour, density = self.field(points)
        alpha = 1 - torch.exp(-density * (depth[1] - depth[0]))
        through = torch.cumprod(1 - alpha + 1e-6, dim=-1) / (1 - alpha + 1e-6)
        return ((alpha * through)[..., None] * colour).sum(-2)

    def forward(self, images):
        pixels = self.cameras.height * self.cameras.width
        ray_index = torch.randperm(pixels, device="cuda")[: self.rays // len(self.cameras)]
        rendered = self.render(self.get_pose(), ray_index)
        return F.mse_loss(rendered, images.flatten(1, 2)[:, ray_index])


def main():
    torch.manual_seed(0)
    cameras = Cameras(8, height=300, width=400)
    images = torch.rand(8, 300, 400, 3, device="cuda")
    graph = Graph(cameras).cuda()
    optim = torch.optim.Adam(graph.field.parameters(), lr=1e-3)
    optim_pose = torch.optim.Adam(graph.se3.parameters(), lr=3e-3)
    for it in range(4):
        optim.zero_grad()
        optim_pose.zero_grad()
        loss = graph(images)
        loss.backward()
        optim.step()
        optim_pose.step()
        print(it, loss.item())


if __name__ == "__main__":
    main()
