"""Detection and segmentation: torchvision, ultralytics, segmentation-models."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


def _images_and_boxes(device: str, masks: bool = False, points: bool = False) -> Any:
    import torch

    draw = torch.Generator().manual_seed(0)
    images = [torch.rand(3, 96, 96, generator=draw).to(device) for _ in range(2)]
    targets = []
    for i in range(2):
        target = {
            "boxes": torch.tensor([[8.0, 8, 40, 48], [30, 20 + i, 80, 90]]).to(device),
            "labels": torch.tensor([1, 2]).to(device),
        }
        if masks:
            shapes = torch.zeros(2, 96, 96, dtype=torch.uint8)
            shapes[0, 8:48, 8:40] = 1
            shapes[1, 20:90, 30:80] = 1
            target["masks"] = shapes.to(device)
        if points:
            target["keypoints"] = torch.tensor([[[20.0, 20, 1]] * 3, [[50.0, 50, 1]] * 3]).to(
                device
            )
            target["labels"] = torch.tensor([1, 1]).to(device)
        targets.append(target)
    return images, targets


def _detector(model: Any, device: str, **kinds: bool) -> list[Any]:
    """Two steps of SGD on the sum of a detector's losses, then one image."""
    import torch

    model = model.to(device).train()
    images, targets = _images_and_boxes(device, **kinds)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = []
    for _ in range(2):
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        found = model(images[:1])
    return [*losses, float(len(found))]


SMALL = {"weights": None, "weights_backbone": None, "min_size": 96, "max_size": 96}
FEW = {
    "rpn_post_nms_top_n_train": 50,
    "rpn_post_nms_top_n_test": 50,
    "box_batch_size_per_image": 16,
}
"""Fewer regions than the default, whose heads take a CPU minutes."""


@program("torchvision/mask-rcnn", "torchvision")
def mask_rcnn(device: str) -> Any:
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    return _detector(maskrcnn_resnet50_fpn(num_classes=3, **SMALL, **FEW), device, masks=True)


@program("torchvision/faster-rcnn-mobilenet", "torchvision")
def faster_rcnn(device: str) -> Any:
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_fpn

    return _detector(fasterrcnn_mobilenet_v3_large_fpn(num_classes=3, **SMALL, **FEW), device)


@program("torchvision/keypoint-rcnn", "torchvision")
def keypoint_rcnn(device: str) -> Any:
    from torchvision.models.detection import keypointrcnn_resnet50_fpn

    model = keypointrcnn_resnet50_fpn(num_classes=2, num_keypoints=3, **SMALL, **FEW)
    return _detector(model, device, points=True)


@program("torchvision/retinanet", "torchvision")
def retinanet(device: str) -> Any:
    from torchvision.models.detection import retinanet_resnet50_fpn

    return _detector(retinanet_resnet50_fpn(num_classes=3, **SMALL), device)


@program("torchvision/fcos", "torchvision")
def fcos(device: str) -> Any:
    from torchvision.models.detection import fcos_resnet50_fpn

    return _detector(fcos_resnet50_fpn(num_classes=3, **SMALL), device)


@program("torchvision/ssdlite", "torchvision")
def ssdlite(device: str) -> Any:
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    return _detector(model, device)


@program("torchvision/deeplab", "torchvision")
def deeplab(device: str) -> Any:
    import torch
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model = model.to(device).train()
    images = torch.randn(2, 3, 64, 64).to(device)
    masks = torch.randint(0, 3, (2, 64, 64)).to(device)
    return steps_of(
        model, lambda: torch.nn.functional.cross_entropy(model(images)["out"], masks), steps=2
    )


@program("torchvision/resnet-transforms-workers", "torchvision", "PIL.Image")
def resnet(device: str) -> Any:
    import torch
    from torchvision import models
    from torchvision.transforms import v2

    class Pictures(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self) -> None:
            self.change = v2.Compose(
                [
                    v2.ToImage(),
                    v2.Resize((40, 40)),
                    v2.CenterCrop(32),
                    v2.ToDtype(torch.float32, scale=True),
                    v2.Normalize([0.5] * 3, [0.2] * 3),
                ]
            )

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            import numpy as np
            from PIL import Image

            pixels = np.full((48, 48, 3), 20 * index, dtype=np.uint8)
            pixels[:24] = 5 * index
            return self.change(Image.fromarray(pixels)), index % 2

    model = models.resnet18(weights=None, num_classes=2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mix = v2.MixUp(num_classes=2)
    losses = []
    for images, labels in torch.utils.data.DataLoader(
        Pictures(), batch_size=4, num_workers=1, pin_memory=True
    ):
        images, labels = mix(images, labels)
        out = model(images.to(device, non_blocking=True))
        loss = torch.nn.functional.cross_entropy(out, labels.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@program("torchvision/raft-optical-flow", "torchvision")
def raft(device: str) -> Any:
    import torch
    from torchvision.models.optical_flow import raft_small

    model = raft_small(weights=None).to(device).train()
    one, two = (torch.rand(1, 3, 128, 128).to(device) * 2 - 1 for _ in range(2))

    def loss() -> Any:
        return sum(flow.abs().mean() for flow in model(one, two, num_flow_updates=2))

    return steps_of(model, loss, lr=1e-4, steps=2)


@program("torchvision/video-r3d", "torchvision")
def video(device: str) -> Any:
    import torch
    from torchvision.models.video import r3d_18

    model = r3d_18(weights=None, num_classes=3).to(device).train()
    clips = torch.randn(2, 3, 4, 32, 32).to(device)
    labels = torch.tensor([0, 1]).to(device)
    return steps_of(model, lambda: torch.nn.functional.cross_entropy(model(clips), labels), steps=2)


@program("ultralytics/yolo-train", "ultralytics", "cv2", "torchvision")
def yolo(device: str) -> Any:
    from pathlib import Path

    import cv2
    import numpy as np
    import torch
    from ultralytics import YOLO

    for split in ("train", "val"):
        Path(f"data/images/{split}").mkdir(parents=True)
        Path(f"data/labels/{split}").mkdir(parents=True)
        for i in range(4):
            picture = np.zeros((64, 64, 3), dtype=np.uint8)
            picture[10 : 30 + i, 12:40] = 200
            cv2.imwrite(f"data/images/{split}/{i}.png", picture)
            Path(f"data/labels/{split}/{i}.txt").write_text("0 0.4 0.32 0.43 0.35\n")
    root = Path("data").resolve()
    Path("data.yaml").write_text(
        f"path: {root}\ntrain: images/train\nval: images/val\nnames:\n  0: box\n"
    )
    model = YOLO("yolov8n.yaml")
    model.train(
        data="data.yaml",
        epochs=1,
        imgsz=64,
        batch=2,
        device=0 if device == "cuda" else "cpu",
        workers=0,
        amp=False,
        plots=False,
        seed=0,
        verbose=False,
        optimizer="SGD",
        project=str(Path("runs").resolve()),
    )
    items = model.trainer.tloss
    values = items.values() if isinstance(items, dict) else torch.as_tensor(items).flatten()
    return [float(value) for value in values]
