"""A processor for Kimi-VL, for starts of vLLM without the model's own files.

Kimi-VL's processor is Python code in the model's repository. This one makes inputs of the same
shapes for vLLM's profiling run, with the sizes of ``preprocessor_config.json``: an image of at most
``in_token_limit`` patches, padded to whole groups of ``merge_kernel_size`` patches, each of which
becomes one token (`KimiVLProcessingInfo.get_num_image_tokens` in vLLM counts them in the same way).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor


class KimiVLImageProcessor(BaseImageProcessor):
    """Cuts images into patches."""

    model_input_names = ["pixel_values", "image_grid_hws"]  # noqa: RUF012 - transformers' own form

    def __init__(
        self, patch_size: int, merge_kernel_size: list[int], in_token_limit: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.merge_kernel_size = merge_kernel_size
        self.in_token_limit = in_token_limit

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """``pixel_values``: all patches of all images; ``image_grid_hws``: rows and columns of an
        image's patches.
        """
        images = images if isinstance(images, list) else [images]
        pieces = [self._patches(image) for image in images]
        sizes = [(piece.shape[0], piece.shape[1]) for piece in pieces]
        patches = torch.cat([piece.flatten(0, 1) for piece in pieces])
        return BatchFeature({"pixel_values": patches, "image_grid_hws": torch.tensor(sizes)})

    def _patches(self, image: Any) -> torch.Tensor:
        """Patches of an image: rows, columns, channels, height, width."""
        side = self.patch_size
        width, height = image.size
        count = (width // side) * (height // side)
        if count > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            width, height = int(width * scale), int(height * scale)
            image = image.resize((width, height))
        rows, columns = (side * kernel for kernel in self.merge_kernel_size)
        padded = torch.zeros(
            3, math.ceil(height / rows) * rows, math.ceil(width / columns) * columns
        )
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        padded[:, :height, :width] = pixels / 127.5 - 1
        return padded.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)


class KimiVLProcessor(ProcessorMixin):
    """Replaces an image's token in a text by as many as the image has groups of patches."""

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012 - transformers' own form
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
    image_token = "<|media_pad|>"

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> BatchFeature:
        texts = [text] if isinstance(text, str) else list(text)
        found = {} if images is None else dict(self.image_processor.preprocess(images))
        rows, columns = self.image_processor.merge_kernel_size
        grids = iter(found.get("image_grid_hws", torch.empty(0, 2)).tolist())
        expanded = []
        for one in texts:
            first, *rest = one.split(self.image_token)
            for part in rest:
                height, width = next(grids, (rows, columns))
                first += self.image_token * (height // rows * (width // columns)) + part
            expanded.append(first)
        tokens = self.tokenizer(expanded, add_special_tokens=False)
        return BatchFeature({"input_ids": torch.tensor(tokens["input_ids"]), **found})
