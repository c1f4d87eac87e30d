"""Hugging Face's Trainer with the collators and models of its examples."""

from __future__ import annotations

from typing import Any

from foreign.programs import program

TRAINER = ("transformers", "datasets", "transformers.trainer_seq2seq", "transformers.generation")
WORDS = [f"w{i}" for i in range(120)]


def tokenizer() -> Any:
    """A tokenizer made on the spot, of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "[MASK]"]
    table = {word: i for i, word in enumerate(special + WORDS)}
    made = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",
        unk_token="[UNK]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        mask_token="[MASK]",
    )


def sentences(count: int = 16) -> list[str]:
    """Texts of different lengths."""
    return [
        " ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(4 + (5 * i) % 11))
        for i in range(count)
    ]


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row] + [
        row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row
    ]


def arguments(cls: Any = None, **more: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    return (cls or TrainingArguments)(**{**given, **more})


def small(cls: Any, **more: Any) -> Any:
    from foreign.architectures import shrunk

    return shrunk(cls, **more)


@program("hf/trainer-padding-collator", *TRAINER, "transformers.models.bert.modeling_bert")
def trainer_padding(device: str) -> Any:
    from datasets import Dataset
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        DataCollatorWithPadding,
        Trainer,
    )

    words = tokenizer()
    data = Dataset.from_dict({"text": sentences(), "label": [i % 2 for i in range(16)]})
    data = data.map(lambda row: words(row["text"]), remove_columns=["text"])
    trainer = Trainer(
        model=BertForSequenceClassification(small(BertConfig)),
        args=arguments(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorWithPadding(words),
        compute_metrics=lambda found: {
            "accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())
        },
    )
    trainer.train()
    return losses_of(trainer)


@program("hf/trainer-causal-lm", *TRAINER, "transformers.models.gpt2.modeling_gpt2")
def trainer_causal(device: str) -> Any:
    from datasets import Dataset
    from transformers import (
        DataCollatorForLanguageModeling,
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
    )

    words = tokenizer()
    data = Dataset.from_dict(dict(words(sentences())))
    trainer = Trainer(
        model=GPT2LMHeadModel(small(GPT2Config)),
        args=arguments(gradient_accumulation_steps=2, max_grad_norm=1.0, eval_strategy="epoch"),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    trainer.train()
    return losses_of(trainer)


@program("hf/trainer-masked-lm-workers", *TRAINER, "transformers.models.roberta.modeling_roberta")
def trainer_masked(device: str) -> Any:
    from datasets import Dataset
    from transformers import (
        DataCollatorForLanguageModeling,
        RobertaConfig,
        RobertaForMaskedLM,
        Trainer,
    )

    words = tokenizer()
    data = Dataset.from_dict(dict(words(sentences())))
    trainer = Trainer(
        model=RobertaForMaskedLM(small(RobertaConfig)),
        args=arguments(dataloader_num_workers=1, lr_scheduler_type="cosine"),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(words, mlm_probability=0.3, seed=0),
    )
    trainer.train()
    return losses_of(trainer)


@program("hf/trainer-llama-checkpointing", *TRAINER, "transformers.models.llama.modeling_llama")
def trainer_llama(device: str) -> Any:
    from datasets import Dataset
    from transformers import (
        DataCollatorForLanguageModeling,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
    )

    words = tokenizer()
    data = Dataset.from_dict(dict(words(sentences())))
    trainer = Trainer(
        model=LlamaForCausalLM(small(LlamaConfig)),
        args=arguments(gradient_checkpointing=True, optim="adamw_torch_fused"),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    trainer.train()
    return losses_of(trainer)


@program("hf/trainer-seq2seq", *TRAINER, "transformers.models.t5.modeling_t5")
def trainer_seq2seq(device: str) -> Any:
    from datasets import Dataset
    from transformers import (
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    words = tokenizer()
    rows = {**words(sentences()), "labels": words(list(reversed(sentences())))["input_ids"]}
    model = T5ForConditionalGeneration(small(T5Config, decoder_start_token_id=0))
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments(
            Seq2SeqTrainingArguments,
            predict_with_generate=True,
            generation_max_length=8,
            eval_strategy="steps",
            eval_steps=4,
        ),
        train_dataset=Dataset.from_dict(rows),
        eval_dataset=Dataset.from_dict({key: value[:4] for key, value in rows.items()}),
        data_collator=DataCollatorForSeq2Seq(words, model=model),
    )
    trainer.train()
    return losses_of(trainer)


@program("hf/trainer-vit", *TRAINER, "transformers.models.vit.modeling_vit")
def trainer_vit(device: str) -> Any:
    import torch
    from transformers import Trainer, ViTConfig, ViTForImageClassification

    class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> dict[str, Any]:
            draw = torch.Generator().manual_seed(index)
            return {"pixel_values": torch.randn(3, 32, 32, generator=draw), "labels": index % 2}

    model = ViTForImageClassification(small(ViTConfig, patch_size=8))
    trainer = Trainer(
        model=model,
        args=arguments(eval_strategy="epoch"),
        train_dataset=Images(),
        eval_dataset=Images(),
    )
    trainer.train()
    return losses_of(trainer)


@program("hf/trainer-whisper", *TRAINER, "transformers.models.whisper.modeling_whisper")
def trainer_whisper(device: str) -> Any:
    import torch
    from transformers import (
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    config = small(WhisperConfig)
    start = config.decoder_start_token_id

    class Speech(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Any]:
            draw = torch.Generator().manual_seed(index)
            return {
                "input_features": torch.randn(16, 64, generator=draw),
                "labels": [start] + [3 + (index + i) % 90 for i in range(3 + index % 4)],
            }

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        features = torch.stack([row["input_features"] for row in rows])
        labels = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=-100
        )
        if (labels[:, 0] == start).all().cpu().item():
            labels = labels[:, 1:]
        return {"input_features": features, "labels": labels}

    trainer = Seq2SeqTrainer(
        model=WhisperForConditionalGeneration(config),
        args=arguments(Seq2SeqTrainingArguments, max_steps=2),
        train_dataset=Speech(),
        data_collator=collate,
    )
    trainer.train()
    return losses_of(trainer)


@program("hf/accelerate-loop", "accelerate", "transformers")
def accelerate_loop(device: str) -> Any:
    import torch
    from accelerate import Accelerator
    from transformers import GPT2Config, GPT2LMHeadModel

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = GPT2LMHeadModel(small(GPT2Config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.utils.data.TensorDataset(torch.randint(3, 100, (16, 12)))
    loader = torch.utils.data.DataLoader(rows, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses


@program("hf/generate-greedy-and-beams", *TRAINER, "transformers.models.llama.modeling_llama")
def generate(device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(small(LlamaConfig, use_cache=True)).to(device).eval()
    ids = torch.arange(3, 11).reshape(2, 4).to(device)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).to(device)
    greedy = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    beams = model.generate(ids, attention_mask=mask, max_new_tokens=6, num_beams=3, do_sample=False)
    return [greedy.sum(), beams.sum()]


@program(
    "hf/trainer-early-stopping", *TRAINER, "transformers.models.distilbert.modeling_distilbert"
)
def trainer_early(device: str) -> Any:
    from datasets import Dataset
    from transformers import (
        DataCollatorForTokenClassification,
        DistilBertConfig,
        DistilBertForTokenClassification,
        EarlyStoppingCallback,
        Trainer,
    )

    words = tokenizer()
    rows = words(sentences())
    rows = {**rows, "labels": [[token % 2 for token in row] for row in rows["input_ids"]]}
    data = Dataset.from_dict(rows)
    trainer = Trainer(
        model=DistilBertForTokenClassification(small(DistilBertConfig, dim=32, n_layers=2)),
        args=arguments(
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        ),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorForTokenClassification(words),
        callbacks=[EarlyStoppingCallback(2)],
    )
    trainer.train()
    return losses_of(trainer)
