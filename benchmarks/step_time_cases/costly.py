"""Changes that cost at least 3% of the step, by the arithmetic of each."""

from benchmarks.step_time_cases.case import Case

COSTLY: dict[str, Case] = {
    # -- gpt.py on an H100: about 22 ms; 8,192 tokens twice, 4 layers, 68M weights in float32
    "optimizer_not_fused": Case(
        "gpt",
        (("lr=3e-4, fused=True)", "lr=3e-4)"),),
        "Lightning-AI/litgpt#857 (adds fused=True)",
        "foreach AdamW passes over 272 MB 18 times and more, fused 7 times: 3 GB, 1 ms, 4.6%",
        ("optimizer = torch.optim.AdamW", "optimizer.step()"),
    ),
    "written_attention": Case(
        "gpt",
        (
            (
                "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
                "        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))\n"
                "        mask = torch.ones(T, T, device=x.device, dtype=torch.bool).tril()\n"
                '        scores = scores.masked_fill(~mask, float("-inf"))\n'
                "        weights = F.softmax(scores, dim=-1)\n"
                "        y = weights.to(v.dtype) @ v\n",
            ),
        ),
        "huggingface/nanoVLM#23, karpathy/nanoGPT model.py (use scaled_dot_product_attention)",
        "128M scores a layer: 25 passes of 268 to 537 MB, 8 times: more than 50 GB, 18 ms, 80%",
        ("scores = (q @", "mask = torch.ones", "masked_fill", "F.softmax", "weights.to(v.dtype)"),
    ),
    "autocast_lost": Case(
        "gpt",
        (
            (
                '            with torch.autocast("cuda", dtype=torch.bfloat16):\n'
                "                loss = model(data[:, :-1], data[:, 1:].contiguous()) / MICRO\n",
                "            loss = model(data[:, :-1], data[:, 1:].contiguous()) / MICRO\n",
            ),
        ),
        "decoderesearch/SAELens#126 (adds autocast)",
        "6 TFLOP of products in float32 at 50 instead of 650 TFLOP/s: more than 5 times as long",
        ("loss = model(",),
    ),
    "float32_before_attention": Case(
        "gpt",
        (
            (
                "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
                "        q, k, v = q.float(), k.float(), v.float()\n"
                "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
            ),
        ),
        "huggingface/optimum-habana#1374 (removes .float() and .clone() around attention)",
        "autocast casts them back: 4 casts of 3 tensors of 16.8 MB, 50 MB each, 8 times: 4.8 GB, "
        "1.1 to 1.7 ms, 5 to 7%",
        ("q, k, v = q.float()", "F.scaled_dot_product_attention"),
    ),
    "shifted_logits": Case(
        "gpt",
        (
            (
                "        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))\n",
                "        logits = logits[:, :-1, :].contiguous()\n"
                "        targets = targets[:, :-1].contiguous()\n"
                "        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))\n",
            ),
        ),
        "huggingface/transformers#35646 (removes contiguous() of shifted logits)",
        "268 MB of logits are copied, and filled and copied in the backward pass: 1.3 GB twice, "
        "0.95 ms, 4.2%",
        ("logits = logits[:, :-1, :].contiguous()",),
    ),
    # Among the harmless ones in the first run, which was wrong: autocast does not cast what
    # log_softmax reads, the kernel itself computes in float32.
    "logits_as_float": Case(
        "gpt",
        (("        logits = self.head(x)\n", "        logits = self.head(x).float()\n"),),
        "huggingface/transformers#33902 (the other way)",
        "268 MB read and 537 MB written, and back in the backward pass, less what log_softmax "
        "then reads more: 2 GB and more, 1 ms, 4%",
        ("logits = self.head(x).float()",),
    ),
    "written_gelu": Case(
        "gpt",
        (
            (
                "        x = F.gelu(x)\n",
                "        cubed = x + 0.044715 * torch.pow(x, 3.0)\n"
                "        x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubed))\n",
            ),
        ),
        "karpathy/nanoGPT#274 (nn.GELU, 1.27 times faster)",
        "about 20 more operators on 67 MB, forward and backward, 8 times: 20 GB, 7 ms, 30%",
        ("cubed = x + 0.044715", "x = 0.5 * x * (1.0"),
    ),
    "written_norm": Case(
        "gpt",
        (
            (
                "class Attention(nn.Module):\n",
                "class RMSNorm(nn.Module):\n"
                "    def __init__(self, width):\n"
                "        super().__init__()\n"
                "        self.weight = nn.Parameter(torch.ones(width))\n"
                "\n"
                "    def forward(self, x):\n"
                "        x = x.to(torch.float32)\n"
                "        variance = x.pow(2).mean(-1, keepdim=True)\n"
                "        x = x * torch.rsqrt(variance + 1e-5)\n"
                "        return self.weight * x\n"
                "\n"
                "\n"
                "class Attention(nn.Module):\n",
            ),
            ("        self.ln_1 = nn.LayerNorm(WIDTH)\n", "        self.ln_1 = RMSNorm(WIDTH)\n"),
            ("        self.ln_2 = nn.LayerNorm(WIDTH)\n", "        self.ln_2 = RMSNorm(WIDTH)\n"),
        ),
        "huggingface/transformers#42461, pytorch/pytorch#153666 (fused RMSNorm, 9 times faster)",
        "16 calls of about 14 operators on 33.5 MB instead of 2 kernels: 10 GB, 3 ms, 13%",
        ("variance = x.pow(2)", "x = x * torch.rsqrt", "return self.weight * x", "RMSNorm(WIDTH)"),
    ),
    "one_hot_embedding": Case(
        "gpt",
        (
            (
                "        x = self.wte(tokens) + self.wpe(positions)\n",
                "        chosen = F.one_hot(tokens, VOCABULARY).to(self.wte.weight.dtype)\n"
                "        x = chosen @ self.wte.weight + self.wpe(positions)\n",
            ),
        ),
        "deepmodeling/deepmd-kit#4747, tinygrad/tinygrad#2761 (lookup instead of a product)",
        "1 GB of int64 and 0.5 GB of float32 written and read, a product of 275 GFLOP and its "
        "gradient, twice: 3 to 5 ms, 15%",
        ("chosen = F.one_hot", "x = chosen @"),
    ),
    "recomputed_blocks": Case(
        "gpt",
        (
            (
                "import torch.nn.functional as F\n",
                "import torch.nn.functional as F\nfrom torch.utils.checkpoint import checkpoint\n",
            ),
            (
                "            x = block(x)\n",
                "            x = checkpoint(block, x, use_reentrant=False)\n",
            ),
        ),
        "QwenLM/Qwen-Image#69, pytorch/torchtitan (selective activation checkpointing)",
        "the forward pass of the blocks again, a third of their 15 ms: 4 ms, 18%",
        ("checkpoint(block, x",),
    ),
    "odd_vocabulary": Case(
        "gpt",
        (
            (
                "HEADS, LAYERS, LENGTH, BATCH, MICRO = 16384,",
                "HEADS, LAYERS, LENGTH, BATCH, MICRO = 16381,",
            ),
        ),
        "karpathy/nanochat#364, RobertRiachi/nanoPALM#6 (pads the vocabulary to a multiple of 64)",
        "products of the head are 2.5 ms of the step, and take 1.3 to 2 times as long with rows "
        "that are not aligned: 1 to 2.5 ms, 4 to 10%",
        ("VOCABULARY, WIDTH, HEADS", "logits = self.head(x)", "self.head ="),
    ),
    "heads_one_by_one": Case(
        "gpt",
        (
            (
                "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n",
                "        heads = []\n"
                "        for head in range(HEADS):\n"
                "            one = slice(head, head + 1)\n"
                "            heads.append(\n"
                "                F.scaled_dot_product_attention(\n"
                "                    q[:, one], k[:, one], v[:, one], is_causal=True\n"
                "                )\n"
                "            )\n"
                "        y = torch.cat(heads, dim=1)\n",
            ),
        ),
        "rasbt/LLMs-from-scratch ch03 (one call for all heads), karpathy/ng-video-lecture gpt.py",
        "16 calls with 8 blocks of heads each fill half of the GPU, and gradients of the slices "
        "are filled and added: 3 ms and more, 13%",
        (
            "for head in range(HEADS)",
            "heads.append(",
            "F.scaled_dot_product_attention(",
            "q[:, one]",
            "torch.cat(heads",
        ),
    ),
    # -- cnn.py on an H100: about 10 ms; 128 images of 128x128
    "images_not_pinned": Case(
        "cnn",
        (
            (
                "SIZE, SIZE, dtype=torch.uint8).pin_memory()",
                "SIZE, SIZE, dtype=torch.uint8)",
            ),
        ),
        "kohya-ss/sd-scripts#1894, constantinpape/torch-em#357 (pin_memory)",
        "6.3 MB from pageable memory at 3 to 12 GB/s take 1 ms instead of 0.1, and the host waits: "
        "5 to 9%",
        ("images = torch.zeros", "x = images.to("),
    ),
    "images_converted_on_host": Case(
        "cnn",
        (
            (
                '        x = images.to("cuda", non_blocking=True)\n',
                '        x = images.float().to("cuda", non_blocking=True)\n',
            ),
            ("        x = (x.float() - mean) / std\n", "        x = (x - mean) / std\n"),
        ),
        "talmolab/sleap-nn#406 (uint8 to the GPU, 4 times fewer bytes)",
        "25 MB of pageable float32 at 6 GB/s: 4 ms, 40%",
        ("x = images.float().to(",),
    ),
    "channels_last_lost": Case(
        "cnn",
        (
            (".cuda().to(memory_format=torch.channels_last)", ".cuda()"),
            ("        x = x.contiguous(memory_format=torch.channels_last)\n", ""),
        ),
        "huggingface/pytorch-image-models#233, ultralytics/ultralytics#26007 (1.2 times faster)",
        "cuDNN transposes inputs and results of each convolution in half precision: 15 to 30%",
        ("model = Net().cuda()", "self.conv1(x)", "self.conv2(y)", "self.stem(x)"),
    ),
    "convolution_biases": Case(
        "cnn",
        (
            ("3, stride, 1, bias=False)", "3, stride, 1)"),
            ("outputs, outputs, 3, 1, 1, bias=False)", "outputs, outputs, 3, 1, 1)"),
        ),
        "milesial/Pytorch-UNet#325, houqb/SPNet#11 (no bias before a batch normalization)",
        "three more passes over 470 MB, to add biases and to sum their gradients: 1.4 GB, 0.5 ms, "
        "5%",
        ("self.conv1 = ", "self.conv2 = ", "y = self.conv1(x)", "y = self.conv2(y)"),
    ),
    "norm_in_float32": Case(
        "cnn",
        (
            ("        y = self.bn1(y)\n", "        y = self.bn1(y.float())\n"),
            ("        y = self.bn2(y)\n", "        y = self.bn2(y.float())\n"),
        ),
        "huggingface/transformers#33902 (a .float() less), NVIDIA/apex (float32 normalization)",
        "casts, and normalization, ReLU and sums in float32: 20 passes more over 470 MB, forward "
        "and backward: 2 ms and more, 20%",
        ("y = self.bn1(y.float())", "y = self.bn2(y.float())"),
    ),
    "finite_check_of_each_gradient": Case(
        "cnn",
        (
            (
                "        optimizer.step()\n",
                "        for parameter in model.parameters():\n"
                "            if not torch.isfinite(parameter.grad).all():\n"
                "                parameter.grad = None\n"
                "        optimizer.step()\n",
            ),
        ),
        "ray-project/ray#50919, HyperGAN/HyperGAN#355 (103 blocking reads fewer in a step)",
        "34 times about 3 kernels, a copy and a wait: 30 us each, 1 ms, 10%",
        ("torch.isfinite(parameter.grad)",),
    ),
    "flips_one_by_one": Case(
        "cnn",
        (
            (
                "        x = x.contiguous(memory_format=torch.channels_last)\n",
                "        x = torch.stack(\n"
                "            [image.flip(-1) if at % 2 else image for at, image in enumerate(x)]\n"
                "        )\n"
                "        for image in x:\n"
                '            image.mul_(1.0 + 0.1 * torch.rand((), device="cuda"))\n'
                "        x = x.contiguous(memory_format=torch.channels_last)\n",
            ),
        ),
        "KellerJordan/cifar10-airbench (flips of a whole batch), kornia/kornia (batched transforms)",
        "64 flips and 128 times 4 tiny kernels: 580 kernels of 2 us, 1.2 ms, 12%",
        ("image.flip(-1)", "x = torch.stack(", "image.mul_(", "for image in x"),
    ),
    # -- agent.py on an H100: about 0.7 ms, bound by launches: about 110 operators of 6 us
    "target_followed_in_a_loop": Case(
        "agent",
        (
            (
                "            torch._foreach_lerp_(followers, parameters, 0.005)\n",
                "            for follower, parameter in zip(followers, parameters, strict=True):\n"
                "                follower.mul_(0.995).add_(parameter, alpha=0.005)\n",
            ),
        ),
        "open-mmlab/mmengine#519 (lerp_), HyperGAN/HyperGAN#355 (foreach)",
        "28 operators instead of one: 0.15 ms, 20%",
        ("follower.mul_(0.995)",),
    ),
    "optimizer_in_a_loop": Case(
        "agent",
        (("lr=1e-3, fused=True)", "lr=1e-3, foreach=False)"),),
        "pytorch/pytorch#92306 (foreach by default)",
        "about 10 operators for each of 14 parameters instead of 2: 0.8 ms, twice as long",
        ("optimizer = torch.optim.Adam", "optimizer.step()"),
    ),
    "clipping_in_a_loop": Case(
        "agent",
        (
            (
                "        torch.nn.utils.clip_grad_norm_(parameters, 10.0, foreach=True)\n",
                "        norm = sum(p.grad.norm() ** 2 for p in parameters) ** 0.5\n"
                "        scale = (10.0 / (norm + 1e-6)).clamp(max=1.0)\n"
                "        for p in parameters:\n"
                "            p.grad.mul_(scale)\n",
            ),
        ),
        "pytorch/pytorch#91846 (foreach gradient clipping)",
        "55 operators instead of 10 to 20: 0.25 ms, 35%",
        ("norm = sum(p.grad.norm()", "p.grad.mul_(scale)"),
    ),
    "metrics_of_each_step": Case(
        "agent",
        (
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n"
                '        figures = {"loss": loss.item(), "value": value.mean().item()}\n'
                '        figures["goal"] = goal.mean().item()\n'
                "        assert len(figures) == 3\n",
            ),
        ),
        "openvdb/fvdb-reality-capture#144, rosinality/style-based-gan-pytorch#50 (item() less often)",
        "3 copies of about 10 us for which the host waits, and 4 operators: 0.06 ms and more, 8%",
        ("loss.item()", "goal.mean().item()"),
    ),
    "states_one_by_one": Case(
        "agent",
        (
            (
                "    return (states - states.mean(dim=1, keepdim=True)) / "
                "(states.std(dim=1, keepdim=True) + 1e-5)\n",
                "    return torch.stack([(s - s.mean()) / (s.std() + 1e-5) for s in states])\n",
            ),
        ),
        "vllm-project/vllm-omni#1614 (a batch instead of elements), DLR-RM/stable-baselines3",
        "5 operators for each of 256 states: 1,300 times 6 us, 8 ms, ten times as long",
        ("return torch.stack([(s - s.mean())",),
    ),
    # -- compiled.py on an H100: about 1.2 ms
    "compilation_lost": Case(
        "compiled",
        (("    model = torch.compile(model)\n", ""),),
        "karpathy/nanoGPT train.py (torch.compile), pytorch/torchtitan",
        "silu and the product of gate and up, 67 MB each, and their gradients in single kernels: "
        "10 passes more, 0.7 GB, 0.25 ms; the optimizer stays: 15%",
        ("model = Net()", "y = self.norm(x)", "return x + self.down(", "loss = model(x)"),
    ),
    # -- ddp.py on two T4: 67 MB of gradients
    "every_micro_batch_reduced": Case(
        "ddp",
        (
            (
                "            with contextlib.nullcontext() if last else model.no_sync():\n",
                "            with contextlib.nullcontext():\n",
            ),
        ),
        "karpathy/nanochat#33, Lightning-AI/pytorch-lightning#4092 (no_sync)",
        "67 MB more over PCIe at 12 GB/s: 5.6 ms, of which the backward pass hides 2: 20%",
        ("contextlib.nullcontext()", "loss = model(x)", "loss.backward()"),
    ),
    "gradients_averaged_again": Case(
        "ddp",
        (
            (
                "        optimizer.step()\n",
                "        for parameter in model.parameters():\n"
                "            dist.all_reduce(parameter.grad)\n"
                "            parameter.grad /= dist.get_world_size()\n"
                "        optimizer.step()\n",
            ),
        ),
        "pytorch/pytorch#43201, h2oai/h2o-llmstudio#664 (avoid a needless reduction)",
        "67 MB more over PCIe, after the backward pass: 5.6 ms, 35%",
        ("dist.all_reduce(parameter.grad)", "parameter.grad /= dist"),
    ),
}
