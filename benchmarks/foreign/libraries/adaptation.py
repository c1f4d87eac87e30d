"""Fine-tuning libraries of the Hugging Face family, and diffusers."""

from __future__ import annotations

from typing import Any

from foreign.libraries.hugging_face import WORDS, losses_of, sentences, small, tokenizer
from foreign.programs import program


def steps_of(model: Any, loss_of: Any, lr: float = 1e-3, steps: int = 3) -> list[Any]:
    """A plain loop: AdamW on what requires gradients."""
    import torch

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(steps):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@program("peft/lora", "peft", "transformers.models.llama.modeling_llama")
def lora(device: str) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(small(LlamaConfig))
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    ).to(device)
    model.print_trainable_parameters()
    ids = torch.randint(3, 100, (2, 12)).to(device)
    found = steps_of(model, lambda: model(input_ids=ids, labels=ids).loss)
    merged = model.merge_and_unload()
    return [*found, merged(input_ids=ids, labels=ids).loss.item()]


@program("peft/dora-and-prompt", "peft", "transformers.models.gpt2.modeling_gpt2")
def prompts(device: str) -> Any:
    import torch
    from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(3, 100, (2, 12)).to(device)
    found = []
    for settings in (
        PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4),
        LoraConfig(r=4, use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True),
    ):
        model = get_peft_model(GPT2LMHeadModel(small(GPT2Config)), settings).to(device)
        found += steps_of(model, lambda model=model: model(input_ids=ids, labels=ids).loss)
    return found


def _trl(trainer: Any) -> list[float]:
    trainer.train()
    return losses_of(trainer)


def _settings(cls: Any, **more: Any) -> Any:
    return cls(
        **{
            "output_dir": "out",
            "per_device_train_batch_size": 2,
            "max_steps": 2,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "bf16": False,
            "gradient_checkpointing": False,
            **more,
        }
    )


@program(
    "trl/sft", "trl.trainer.sft_trainer", "transformers.models.llama.modeling_llama", "datasets"
)
def sft(device: str) -> Any:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    return _trl(
        SFTTrainer(
            model=LlamaForCausalLM(small(LlamaConfig)),
            args=_settings(SFTConfig, max_length=24),
            train_dataset=Dataset.from_dict({"text": sentences()}),
            processing_class=tokenizer(),
        )
    )


@program(
    "trl/dpo", "trl.trainer.dpo_trainer", "transformers.models.llama.modeling_llama", "datasets"
)
def dpo(device: str) -> Any:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer

    rows = {
        "prompt": sentences(8),
        "chosen": [" " + WORDS[i] + " " + WORDS[i + 1] for i in range(8)],
        "rejected": [" " + WORDS[i + 20] for i in range(8)],
    }
    config = small(LlamaConfig)
    return _trl(
        DPOTrainer(
            model=LlamaForCausalLM(config),
            ref_model=LlamaForCausalLM(config),
            args=_settings(DPOConfig, max_length=24),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(),
        )
    )


@program(
    "sentence-transformers/triplets",
    "sentence_transformers",
    "transformers.models.bert.modeling_bert",
)
def triplets(device: str) -> Any:
    from pathlib import Path

    from sentence_transformers import SentenceTransformer, losses, models
    from torch.utils.data import DataLoader
    from transformers import BertConfig, BertModel

    BertModel(small(BertConfig)).save_pretrained("tiny")
    tokenizer().save_pretrained("tiny")
    assert Path("tiny").is_dir()
    words = models.Transformer("tiny", max_seq_length=24)
    model = SentenceTransformer(
        modules=[words, models.Pooling(words.get_word_embedding_dimension())], device=device
    )
    loss = losses.MultipleNegativesRankingLoss(model).to(device)
    texts = sentences(8)
    found = []
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for pairs in DataLoader(list(zip(texts, reversed(texts), strict=True)), batch_size=4):
        features = []
        for column in pairs:
            rows = model.tokenize(list(column))
            features.append({k: v.to(device) for k, v in rows.items() if hasattr(v, "to")})
        value = loss(features, None)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(value.item())
    vectors = model.encode(texts[:4], convert_to_tensor=True)
    return [*found, vectors.square().sum().item()]


def _unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


@program(
    "diffusers/unconditional",
    "diffusers.models.unets.unet_2d",
    "diffusers.schedulers.scheduling_ddpm",
    "diffusers.training_utils",
)
def unconditional(device: str) -> Any:
    import torch
    import torch.nn.functional as F
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    model = _unet().to(device)
    average = EMAModel(model.parameters())
    noises = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, 10)
    losses = []
    for _ in range(3):
        clean = torch.randn(2, 3, 16, 16).to(device)
        noise = torch.randn(clean.shape).to(device)
        at = torch.randint(0, 100, (2,)).to(device)
        loss = F.mse_loss(model(noises.add_noise(clean, noise, at), at).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.detach().item())
    return losses


@program("diffusers/ddim-pipeline", "diffusers.models.unets.unet_2d", "diffusers.pipelines.ddim")
def pipeline(device: str) -> Any:
    import torch
    from diffusers import DDIMPipeline, DDIMScheduler

    made = DDIMPipeline(_unet(), DDIMScheduler(num_train_timesteps=100)).to(device)
    made.set_progress_bar_config(disable=True)
    found = made(
        batch_size=1,
        generator=torch.Generator("cpu").manual_seed(0),
        num_inference_steps=3,
        output_type="np",
    )
    return [float(found.images.mean())]


@program(
    "diffusers/latent-text-to-image",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d_condition",
    "transformers.models.clip.modeling_clip",
)
def latent(device: str) -> Any:
    import torch
    import torch.nn.functional as F
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    images = AutoencoderKL(
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        latent_channels=4,
    ).to(device)
    text = CLIPTextModel(small(CLIPTextConfig)).to(device)
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).to(device)
    for frozen in (images, text):
        frozen.requires_grad_(False)
    noises = DDPMScheduler(num_train_timesteps=100)
    ids = torch.randint(3, 100, (2, 8)).to(device)
    pixels = torch.randn(2, 3, 16, 16).to(device)

    def loss() -> Any:
        latents = images.encode(pixels).latent_dist.mode() * 0.18215
        noise = torch.randn(latents.shape).to(device)
        at = torch.randint(0, 100, (2,)).to(device)
        given = noises.add_noise(latents, noise, at)
        return F.mse_loss(model(given, at, encoder_hidden_states=text(ids)[0]).sample, noise)

    return steps_of(model, loss)


@program("diffusers/transformer-flow-matching", "diffusers.models.transformers.dit_transformer_2d")
def flow(device: str) -> Any:
    import torch
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        norm_num_groups=8,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=100,
    ).to(device)
    clean = torch.randn(2, 4, 8, 8).to(device)
    noise = torch.randn(2, 4, 8, 8).to(device)
    at = torch.rand(2).to(device)
    classes = torch.tensor([1, 2]).to(device)

    def loss() -> Any:
        mixed = (1 - at[:, None, None, None]) * clean + at[:, None, None, None] * noise
        out = model(mixed, timestep=(at * 99).long(), class_labels=classes).sample
        return (out - (noise - clean)).square().mean()

    model.eval()  # no label dropout, which would draw on the device
    return steps_of(model, loss)


@program("bitsandbytes/adam-8bit", "bitsandbytes")
def adam_8bit(device: str) -> Any:
    import bitsandbytes as bnb
    import torch

    model = torch.nn.Linear(64, 64).to(device)
    optimizer = bnb.optim.Adam8bit(model.parameters(), lr=1e-3, min_8bit_size=1024)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(4, 64).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@program("torchao/int8-weights", "torchao")
def int8_weights(device: str) -> Any:
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model = model.to(device).eval()
    quantize_(model, Int8WeightOnlyConfig())
    with torch.no_grad():
        return [model(torch.ones(4, 64).to(device)).square().mean().item()]


@program("torchao/quantization-aware", "torchao")
def quantization_aware(device: str) -> Any:
    import torch
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    model = model.to(device)
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantize_(model, QATConfig(weight_config=weights, step="prepare"))
    data = torch.randn(4, 64).to(device)
    return steps_of(model, lambda: model(data).square().mean())
