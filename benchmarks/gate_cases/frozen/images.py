"""Changes of the programs that see or make images: imagenet, guided, vit, dcgan and vae."""

from __future__ import annotations

from benchmarks.gate_cases.frozen.case import Case, Edit, Move

_NET_PRINT = Edit("train.py", 'print("validation", losses, top5)', 'print(f" * {losses} {top5}")')
_NET_RATE = Edit("args.json", '"lr": 0.1,', '"lr": 0.05,')
_NET_ORDER = Edit(
    "args.json",
    '  "momentum": 0.9,\n  "weight_decay": 0.0001,\n',
    '  "weight_decay": 0.0001,\n  "momentum": 0.9,\n',
)
_NET_METER = Edit(
    "vision/meters.py",
    "class AverageMeter:\n",
    'class AverageMeter:\n    """Computes and stores the average."""\n\n',
)
_NET_ARCH = Edit(
    "vision/resnet.py",
    'ARCHS = {"resnet10": (1, 1, 1), "resnet16": (2, 2, 2)}',
    'ARCHS = {"resnet10": (1, 1, 1), "resnet16": (2, 2, 2), "resnet22": (3, 3, 3)}',
)
_NET_MAKE = (
    Edit(
        "vision/resnet.py",
        "def _make_layer(self, planes, blocks, stride=1):",
        "def _stage(self, planes, blocks, stride=1):",
    ),
    Edit("vision/resnet.py", "self._make_layer(", "self._stage(", times=3),
)
_NET_FILE = (
    Move("vision/meters.py", "vision/metrics.py"),
    Edit(
        "train.py",
        "from vision.meters import AverageMeter, accuracy",
        "from vision.metrics import AverageMeter, accuracy",
    ),
)

_GUIDED_PRINT = Edit(
    "guided/train_util.py",
    'print(f"step {self.step} loss {loss.item():.4f}")',
    'print(f"step {self.step:06d} loss {loss.item():.4f}")',
)
_GUIDED_RATE = Edit("flags.sh", "--lr 1e-4", "--lr 3e-4")
_GUIDED_EPS = Edit(
    "guided/gaussian_diffusion.py",
    "        eps = model(x, t)\n",
    "        # the model predicts the noise\n        eps = model(x, t)\n",
)
_GUIDED_FLAGS = Edit(
    "guided/script_util.py",
    '    parser.add_argument("--lr", type=float, default=1e-4)\n',
    '    # training\n    parser.add_argument("--lr", type=float, default=1e-4)\n',
)
_GUIDED_SHORT = Edit(
    "guided/unet.py",
    "        same = channels == out_channels\n        self.skip = nn.Identity() if same else nn.Conv2d(channels, out_channels, 1)\n",
    "        if channels == out_channels:\n            self.skip = nn.Identity()\n        else:\n            self.skip = nn.Conv2d(channels, out_channels, 1)\n",
)
_GUIDED_FILE = (
    Move("guided/train_util.py", "guided/train_loop.py"),
    Edit(
        "train.py",
        "from guided.train_util import TrainLoop\n",
        "from guided.train_loop import TrainLoop\n",
    ),
)

_VIT_PRINT = Edit(
    "train.py",
    'print(f"train {batch_idx}: loss {loss.item():.3f}")',
    'print(f"Train: [{batch_idx:>4d}] Loss: {loss.item():#.3g}")',
)
_VIT_RATE = Edit(
    "configs/vit_tiny.yaml", "  lr: 0.001\n", "  lr: 0.0005   # half, the batches are small\n"
)
_VIT_SMOOTH = Edit("vit/data.py", "label_smoothing=0.1", "label_smoothing=0.05")
_VIT_DECAY = Edit("configs/vit_tiny.yaml", "model_ema_decay: 0.99\n", "model_ema_decay: 0.995\n")
_VIT_TYPES = Edit(
    "vit/model.py",
    "def forward_features(self, x):",
    "def forward_features(self, x: torch.Tensor) -> torch.Tensor:",
)
_VIT_ACT = Edit(
    "vit/model.py",
    "def __init__(self, dim, ratio=4.0, act_layer=nn.GELU):\n        super().__init__()\n        self.fc1 = nn.Linear(dim, int(dim * ratio))\n        self.act = act_layer()\n        self.fc2 = nn.Linear(int(dim * ratio), dim)",
    "def __init__(self, dim, ratio=4.0, act_layer=nn.GELU):\n        super().__init__()\n        hidden = int(dim * ratio)\n        self.fc1 = nn.Linear(dim, hidden)\n        self.act = act_layer()\n        self.fc2 = nn.Linear(hidden, dim)",
)
_VIT_SCALER = (
    Move("vit/scaler.py", "vit/native_scaler.py"),
    Edit(
        "train.py",
        "from vit.scaler import NativeScaler",
        "from vit.native_scaler import NativeScaler",
    ),
)

_GAN_PRINT = Edit(
    "train.py", "    print(len(img_list))\n", '    print(f"{len(img_list)} grids of images")\n'
)
_GAN_RATE = Edit("flags.txt", "--lr=0.0002\n--beta1=0.5\n", "--lr=0.0001\n--beta1=0.5\n")
_GAN_HELP = Edit(
    "options.py",
    'parser.add_argument("--ngf", type=int, default=64)',
    'parser.add_argument("--ngf", type=int, default=64, help="feature maps of the generator")',
)
_GAN_INIT = Edit(
    "networks.py",
    '    classname = m.__class__.__name__\n    if classname.find("Conv") != -1:\n',
    '    """Called on netG and netD."""\n    name = m.__class__.__name__\n    if "Conv" in name:\n',
)
_GAN_INIT_MORE = Edit(
    "networks.py", 'elif classname.find("BatchNorm") != -1:', 'elif "BatchNorm" in name:'
)
_GAN_SEED = Edit("flags.txt", "--manualSeed=999", "--manualSeed=17")

_VAE_PRINT = Edit(
    "train.py",
    'print(f"====> Test set loss: {test_loss:.1f}")',
    'print(f"====> Epoch {epoch}: test set loss {test_loss:.1f}")',
)
_VAE_RATE = Edit("config.json", '"lr": 0.001,', '"lr": 0.002,')
_VAE_STD = Edit(
    "vae/model.py",
    "        eps = torch.randn_like(std)\n        return mu + eps * std\n",
    "        noise = torch.randn_like(std)\n        return mu + noise * std\n",
)
_VAE_KLD = Edit(
    "vae/loss.py", "    kld = -0.5 *", "    # https://arxiv.org/abs/1312.6114\n    kld = -0.5 *"
)

IMAGES: dict[str, Case] = {
    # -- imagenet
    "imagenet: larger images": Case(
        "imagenet",
        "json",
        (
            Edit("args.json", '"image_size": 32,', '"image_size": 36,', "a"),
            _NET_RATE,
            _NET_METER,
            *_NET_MAKE,
        ),
    ),
    "imagenet: no_grad of the validation removed": Case(
        "imagenet",
        "decorator",
        (
            Edit("train.py", "@torch.no_grad()\ndef validate(", "def validate(", "a"),
            Edit("train.py", '    top5 = AverageMeter("Acc@5", ":6.2f")\n    model.eval()\n', '    top5 = AverageMeter("Acc@5", ":6.2f")\n    # switch to evaluate mode\n    model.eval()\n'),
            *_NET_FILE,
            _NET_ARCH,
        ),
        "kan-bayashi/ParallelWaveGAN#26",
    ),
    "imagenet: the best weights stay on the device": Case(
        "imagenet",
        "lifetime",
        (
            Edit("train.py", "            best = {name: value.cpu() for name, value in copy.copy(model.state_dict()).items()}\n", "            best = copy.deepcopy(model.state_dict())\n", "a"),
            Edit("train.py", '    print(f"best {best_acc:.2f}, {len(best)} tensors")\n', '    print(f"best {best_acc:.2f} %, {len(best)} tensors")\n'),
            _NET_METER,
            _NET_ORDER,
        ),
        "facebookresearch/fairseq@a2314b4e",
    ),
    "imagenet: normalisation in single precision": Case(
        "imagenet",
        "dtype",
        (
            Edit(
                "vision/resnet.py",
                "        out = F.relu(self.bn1(self.conv1(x)), inplace=True)\n        out = self.bn2(self.conv2(out))\n",
                "        # more stable than in half precision\n        out = F.relu(self.bn1(self.conv1(x).float()), inplace=True)\n        out = self.bn2(self.conv2(out).float())\n",
                "a",
            ),
            _NET_RATE,
            _NET_ARCH,
            _NET_PRINT,
        ),
        "facebookresearch/detectron2@c5de84ce",
    ),
    "imagenet: a wider network": Case(
        "imagenet",
        "default argument",
        (
            Edit("vision/resnet.py", "    def __init__(self, layers, num_classes=100, width=32):\n", "    def __init__(self, layers, num_classes=100, width=40):\n", "a"),
            Edit("vision/resnet.py", '"""Residual networks."""\n', '"""Residual networks for small images."""\n'),
            *_NET_MAKE,
            *_NET_FILE,
        ),
    ),
    "imagenet: activations recorded by a hook": Case(
        "imagenet",
        "new file",
        (
            Edit(
                "vision/probe.py",
                "",
                '''\
"""Statistics of the activations, for the log."""


class ActivationProbe:
    """Records what a layer returns while a network is trained."""

    def __init__(self, layer):
        self.recorded = []
        self.handle = layer.register_forward_hook(self.hook)

    def hook(self, module, inputs, output):
        if module.training:
            self.recorded.append(output.detach())

    def summary(self):
        return [float(output.float().std()) for output in self.recorded]
''',
                "a",
            ),
            Edit("train.py", "    best, best_acc = None, -1.0\n", "    probe = ActivationProbe(model.layer2)\n    best, best_acc = None, -1.0\n", "a"),
            Edit("train.py", "from vision.meters import AverageMeter, accuracy\n", "from vision.meters import AverageMeter, accuracy\nfrom vision.probe import ActivationProbe\n", "a", named=False),
            Edit("train.py", '    print(f"best {best_acc:.2f}, {len(best)} tensors")\n', '    print(f"best {best_acc:.2f}, {len(best)} tensors")\n    print("activations", probe.summary())\n', "a", named=False),
            _NET_RATE,
        ),
        "facebookresearch/detectron2@a7e86f52",
    ),
    "imagenet: a deeper network and no autocast": Case(
        "imagenet",
        "two causes",
        (
            Edit("args.json", '  "arch": "resnet10",\n', '  "arch": "resnet16",\n', "a"),
            Edit("args.json", '"amp": true\n', '"amp": false\n', "b"),
            _NET_METER,
            _NET_PRINT,
        ),
    ),
    # -- guided
    "guided: no microbatches": Case(
        "guided",
        "shell",
        (
            Edit("flags.sh", 'TRAIN_FLAGS="--lr 1e-4 --batch_size 8 --microbatch 4 --ema_rate', 'TRAIN_FLAGS="--lr 1e-4 --batch_size 8 --ema_rate', "a"),
            _GUIDED_EPS,
            _GUIDED_PRINT,
            _GUIDED_SHORT,
        ),
        "openai/guided-diffusion@0ba878e",
    ),
    "guided: three averages of the weights": Case(
        "guided",
        "shell",
        (
            Edit("flags.sh", "--ema_rate 0.999 --iterations 2", "--ema_rate 0.99,0.999,0.9999 --iterations 2", "a"),
            _GUIDED_FLAGS,
            _GUIDED_EPS,
        ),
    ),
    "guided: samples with gradients": Case(
        "guided",
        "no_grad",
        (
            Edit(
                "guided/gaussian_diffusion.py",
                "            t = torch.full((shape[0],), i, device=device)\n            with torch.no_grad():\n                img = self.p_mean(model, img, t)\n",
                "            t = torch.full((shape[0],), i, device=device)\n            img = self.p_mean(model, img, t)\n",
                "a",
            ),
            Edit("guided/gaussian_diffusion.py", '"""The noise: how it is added, and how it is taken away."""\n', '"""The noise: how it is added, and how it is taken away.\n\nAfter https://arxiv.org/abs/2006.11239.\n"""\n'),
            *_GUIDED_FILE,
            Edit("train.py", "print(sample.clamp(-1, 1).cpu().shape)", "print(sample.detach().clamp(-1, 1).cpu().shape)"),
        ),
        "lucidrains/denoising-diffusion-pytorch@57e0de2",
    ),
    "guided: the losses without autocast": Case(
        "guided",
        "autocast",
        (
            Edit(
                "guided/train_util.py",
                '            with torch.autocast("cuda", dtype=torch.bfloat16):\n                losses = self.diffusion.training_losses(self.model, micro, t)\n            loss = losses["loss"].mean()\n',
                '            losses = self.diffusion.training_losses(self.model, micro, t)\n            loss = losses["loss"].mean()\n',
                "a",
            ),
            _GUIDED_PRINT,
            _GUIDED_FLAGS,
        ),
        "openai/guided-diffusion@0ba878e",
    ),
    "guided: master parameters": Case(
        "guided",
        "copy",
        (
            Edit(
                "guided/train_util.py",
                "        self.params = list(model.parameters())\n",
                "        self.params = list(model.parameters())\n        self.master_params = [p.detach().clone().float() for p in self.params]\n",
                "a",
            ),
            Edit("guided/nn.py", "def update_ema(target_params, source_params, rate=0.99):\n", 'def update_ema(target_params, source_params, rate=0.99):\n    """Moves the targets towards the sources."""\n'),
            _GUIDED_RATE,
            _GUIDED_SHORT,
        ),
        "openai/guided-diffusion@0ba878e",
    ),
    "guided: the average of the weights is loaded for samples": Case(
        "guided",
        "lifetime",
        (
            Edit("guided/train_util.py", "    def run_loop(self):\n", "    def averaged(self):\n        return self.ema_params[0]\n\n    def run_loop(self):\n"),
            Edit(
                "guided/train_util.py",
                "    def run_step(self, batch):\n        self.forward_backward(batch)\n        self.opt.step()\n        self._update_ema()\n",
                "    def run_step(self, batch):\n        self.forward_backward(batch)\n        self.opt.step()\n        self._update_ema()\n        self.snapshots.append(copy.deepcopy(self.averaged()))\n",
                "a",
            ),
            Edit("guided/train_util.py", "        self.step = 0\n", "        self.step = 0\n        self.snapshots = []\n", "a", named=False),
            _GUIDED_FLAGS,
        ),
        "facebookresearch/fairseq@eb2d7862",
    ),
    # -- vit
    "vit: the average of the weights on the device": Case(
        "vit",
        "default argument",
        (
            Edit("vit/ema.py", 'def __init__(self, model, decay=0.9999, device="cpu"):', "def __init__(self, model, decay=0.9999, device=None):", "a"),
            Edit("vit/ema.py", '"""A moving average of the weights."""\n', '"""A moving average of the weights, which is what is validated and saved."""\n'),
            _VIT_DECAY,
            _VIT_PRINT,
        ),
    ),
    "vit: larger images": Case(
        "vit",
        "yaml",
        (
            Edit("configs/vit_tiny.yaml", "  img_size: 64\n", "  img_size: 72\n", "a"),
            _VIT_RATE,
            _VIT_TYPES,
            _VIT_ACT,
        ),
        "huggingface/pytorch-image-models@e7497a8b",
    ),
    "vit: attention is not fused": Case(
        "vit",
        "default argument",
        (
            Edit("vit/model.py", "    def __init__(self, dim, num_heads, fused_attn=True):\n", "    def __init__(self, dim, num_heads, fused_attn=False):\n", "a"),
            Edit("vit/model.py", "            attn = (q * self.scale) @ k.transpose(-2, -1)\n            attn = attn.softmax(dim=-1)\n", "            attn = q @ k.transpose(-2, -1) * self.scale\n            attn = attn.softmax(dim=-1)\n"),
            _VIT_SMOOTH,
            _VIT_PRINT,
        ),
        "huggingface/pytorch-image-models@0c90043d",
    ),
    "vit: inference_mode removed": Case(
        "vit",
        "decorator",
        (
            Edit("train.py", "@torch.inference_mode()\ndef validate(", "def validate(", "a"),
            _VIT_TYPES,
            _VIT_RATE,
            *_VIT_SCALER,
        ),
        "huggingface/pytorch-image-models@8630947d",
    ),
    "vit: gradients kept before they are clipped": Case(
        "vit",
        "copy",
        (
            Edit(
                "vit/scaler.py",
                """\
        if clip_grad is not None:
            dispatch_clip_grad(parameters, clip_grad)
""",
                """\
        if clip_grad is not None:
            parameters = list(parameters)
            # what was clipped is logged now and then
            self.unclipped = [p.grad.clone() for p in parameters]
            dispatch_clip_grad(parameters, clip_grad)
""",
                "a",
            ),
            _VIT_DECAY,
            _VIT_ACT,
        ),
        "huggingface/pytorch-image-models@fcb62588",
    ),
    "vit: hooks that are never removed": Case(
        "vit",
        "hook",
        (
            Edit(
                "train.py",
                "    model.train()\n    for batch_idx, (input, target) in enumerate(loader):\n",
                "    model.train()\n    features = []\n    for block in model.blocks:\n        block.mlp.register_forward_hook(lambda module, args, out: features.append(out))\n    for batch_idx, (input, target) in enumerate(loader):\n",
                "a",
            ),
            _VIT_PRINT,
            _VIT_SMOOTH,
            _VIT_TYPES,
        ),
        "Lightning-AI/pytorch-lightning@c9af1a7aec",
    ),
    "vit: layer scale": Case(
        "vit",
        "yaml",
        (
            Edit("configs/vit_tiny.yaml", "  num_classes: 200\n", "  num_classes: 200\n  init_values: 1.0e-4\n", "a"),
            _VIT_RATE,
            _VIT_DECAY,
            _VIT_PRINT,
        ),
    ),
    "vit: batches prefetched to the device": Case(
        "vit",
        "prefetch",
        (
            Edit(
                "vit/prefetch.py",
                "",
                '''\
"""Batches that are on the device before they are needed."""


class PrefetchLoader:
    def __init__(self, loader, device):
        self.batches = [tuple(part.to(device) for part in batch) for batch in loader]

    def __iter__(self):
        return iter(self.batches)
''',
                "a",
            ),
            Edit("train.py", "    return create_loader(args[\"model\"][\"img_size\"], args[\"model\"][\"num_classes\"], size, count, seed)\n", "    loader = create_loader(\n        args[\"model\"][\"img_size\"], args[\"model\"][\"num_classes\"], size, count, seed\n    )\n    return PrefetchLoader(loader, \"cuda\")\n", "a"),
            Edit("train.py", "from vit.model import VisionTransformer\n", "from vit.model import VisionTransformer\nfrom vit.prefetch import PrefetchLoader\n", "a", named=False),
            _VIT_SMOOTH,
            _VIT_TYPES,
        ),
        "huggingface/pytorch-image-models@4666cc9a",
    ),
    "vit: a larger batch, and the average on the device": Case(
        "vit",
        "two causes",
        (
            Edit("configs/vit_tiny.yaml", "  batch_size: 12\n", "  batch_size: 14\n", "a"),
            Edit("train.py", '    model_ema = ModelEmaV2(model, decay=args["model_ema_decay"]) if args["model_ema"] else None\n', '    model_ema = None\n    if args["model_ema"]:\n        model_ema = ModelEmaV2(model, decay=args["model_ema_decay"], device=device)\n', "b"),
            _VIT_RATE,
            _VIT_ACT,
        ),
    ),
    # -- dcgan
    "dcgan: images of the generator are not detached": Case(
        "dcgan",
        "detach",
        (
            Edit("train.py", "            output = netD(fake.detach())\n            errD_fake = criterion(output, label)\n            errD_fake.backward()\n", "            output = netD(fake)\n            errD_fake = criterion(output, label)\n            errD_fake.backward(retain_graph=True)\n", "a"),
            _GAN_PRINT,
            _GAN_RATE,
            _GAN_HELP,
        ),
        "pytorch/examples@190f8fa",
    ),
    "dcgan: samples keep their graph": Case(
        "dcgan",
        "no_grad",
        (
            Edit("train.py", "    with torch.no_grad():\n        return netG(noise).cpu()\n", "    return netG(noise).cpu()\n", "a"),
            _GAN_INIT,
            _GAN_INIT_MORE,
            _GAN_SEED,
        ),
        "pytorch/examples@3243317",
    ),
    "dcgan: a wider generator": Case(
        "dcgan",
        "flags file",
        (
            Edit("flags.txt", "--ngf=32\n", "--ngf=48\n", "a"),
            _GAN_SEED,
            _GAN_HELP,
            _GAN_PRINT,
        ),
    ),
    "dcgan: amsgrad": Case(
        "dcgan",
        "optimizer",
        (
            Edit(
                "train.py",
                "    optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=betas, foreach=False)\n    optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=betas, foreach=False)\n",
                "    options_of_adam = {\"lr\": opt.lr, \"betas\": betas, \"foreach\": False, \"amsgrad\": True}\n    optimizerD = torch.optim.Adam(netD.parameters(), **options_of_adam)\n    optimizerG = torch.optim.Adam(netG.parameters(), **options_of_adam)\n",
                "a",
            ),
            _GAN_RATE,
            _GAN_INIT,
            _GAN_INIT_MORE,
        ),
    ),
    "dcgan: activations that are not in place": Case(
        "dcgan",
        "flag",
        (
            Edit("networks.py", "nn.LeakyReLU(0.2, inplace=True),", "nn.LeakyReLU(0.2),", "a", times=3),
            _GAN_INIT,
            _GAN_INIT_MORE,
            _GAN_PRINT,
        ),
        "huggingface/pytorch-image-models@a9eb4848",
    ),
    # -- vae
    "vae: two samples of each image": Case(
        "vae",
        "json",
        (
            Edit("config.json", '"num_importance_samples": 1,', '"num_importance_samples": 2,', "a"),
            _VAE_RATE,
            _VAE_KLD,
            _VAE_PRINT,
        ),
    ),
    "vae: the test with gradients": Case(
        "vae",
        "no_grad",
        (
            Edit(
                "train.py",
                """\
    with torch.no_grad():
        for i, data in enumerate(loader(cfg, cfg["test_batch_size"], 100 + epoch)):
            data = data.to(device)
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar, cfg["beta"]).item()
            if i == 0:
                gallery.add(data, recon_batch[: len(data)])
""",
                """\
    for i, data in enumerate(loader(cfg, cfg["test_batch_size"], 100 + epoch)):
        data = data.to(device)
        recon_batch, mu, logvar = model(data)
        test_loss += loss_function(recon_batch, data, mu, logvar, cfg["beta"]).item()
        if i == 0:
            gallery.add(data, recon_batch.detach()[: len(data)])
""",
                "a",
            ),
            _VAE_STD,
            _VAE_RATE,
        ),
        "pytorch/examples@9dc6538",
    ),
    "vae: the gallery keeps its images on the device": Case(
        "vae",
        "lifetime",
        (
            Edit(
                "vae/visual.py",
                """\
        n = min(len(data), self.count)
        recon = torch.sigmoid(recon_batch.view_as(data)[:n])
        self.rows.append(torch.cat([data[:n], recon]).cpu())

    def save(self):
        grid = torch.cat(self.rows)
""",
                """\
        recon = torch.sigmoid(recon_batch.view_as(data))
        self.rows.append((data, recon))

    def save(self):
        n = self.count
        grid = torch.cat([torch.cat([data[:n], recon[:n]]).cpu() for data, recon in self.rows])
""",
                "a",
            ),
            _VAE_KLD,
            _VAE_PRINT,
        ),
        "Lightning-AI/pytorch-lightning@651c25feb6",
    ),
}  # fmt: skip
