"""Speech: torchaudio and SpeechBrain."""

from __future__ import annotations

from typing import Any

from foreign.libraries.adaptation import steps_of
from foreign.programs import program


@program("torchaudio/conformer-ctc", "torchaudio")
def conformer(device: str) -> Any:
    import torch
    import torchaudio

    spectrum = torchaudio.transforms.MelSpectrogram(n_fft=128, n_mels=16).to(device)
    model = torchaudio.models.Conformer(16, 2, 32, 2, 3).to(device)
    head = torch.nn.Linear(16, 12).to(device)
    waves = torch.randn(2, 1600).to(device)
    labels = torch.randint(1, 12, (2, 4)).to(device)

    def loss() -> Any:
        features = spectrum(waves).transpose(1, 2)
        lengths = torch.tensor([features.shape[1], features.shape[1] - 5]).to(device)
        out, lengths = model(features, lengths)
        logits = head(out).log_softmax(-1).transpose(0, 1)
        return torch.nn.functional.ctc_loss(
            logits, labels, lengths, torch.tensor([4, 3]).to(device)
        )

    return steps_of(torch.nn.ModuleList([model, head]), loss)


@program("torchaudio/wav2vec2", "torchaudio")
def wav2vec2(device: str) -> Any:
    import torch
    import torchaudio

    model = torchaudio.models.wav2vec2_model(
        extractor_mode="group_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)],
        extractor_conv_bias=False,
        encoder_embed_dim=32,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=8,
        encoder_pos_conv_groups=2,
        encoder_num_layers=2,
        encoder_num_heads=2,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=False,
        encoder_layer_drop=0.0,
        aux_num_out=8,
    ).to(device)
    waves = torch.randn(2, 800).to(device)
    lengths = torch.tensor([800, 600]).to(device)
    return steps_of(model, lambda: model(waves, lengths)[0].log_softmax(-1)[..., 1].neg().mean())


@program(
    "speechbrain/ecapa-speaker", "speechbrain.lobes.models.ECAPA_TDNN", "speechbrain.lobes.features"
)
def ecapa(device: str) -> Any:
    import torch
    from speechbrain.lobes.features import Fbank
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN, Classifier
    from speechbrain.nnet.losses import AdditiveAngularMargin, LogSoftmaxWrapper
    from speechbrain.processing.features import InputNormalization

    features = Fbank(n_mels=16).to(device)
    norm = InputNormalization(norm_type="sentence", std_norm=False).to(device)
    model = ECAPA_TDNN(
        16, channels=[16] * 5, attention_channels=8, lin_neurons=8, res2net_scale=2, device=device
    ).to(device)
    head = Classifier(8, out_neurons=3).to(device)  # its own `device` fails on CUDA too
    loss_of = LogSoftmaxWrapper(AdditiveAngularMargin(margin=0.2, scale=30))
    waves = torch.randn(2, 4000).to(device)
    lengths = torch.ones(2).to(device)
    labels = torch.tensor([[0], [1]]).to(device)

    def loss() -> Any:
        return loss_of(head(model(norm(features(waves), lengths), lengths)), labels)

    return steps_of(torch.nn.ModuleList([model, head]), loss)
