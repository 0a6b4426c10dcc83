"""Images to prompts of a vision model: one position for each patch, and those before them."""

import zlib
from typing import Any

import torch
from torch import Tensor

from cw_lens import backend
from cw_lens.prompts import PromptError, Prompts


def prompts_from_images(model: Any, pixels: Tensor) -> Prompts:
    """Prompts of images for a vision transformer; every position is real, CLS an ordinary key.

    `tokens` names each position: "CLS", what else comes before the patches "R1", "R2", ..., and
    each patch by row and column, "0,0", "0,1", ... . `ids` are checksums that tell images apart.

    Args:
        model: a vision transformer from `wrap_model` or `load_model`.
        pixels: [batch, channel, height, width], as the model's image processor makes them
            (`pixel_values`).

    Raises:
        PromptError: a model that reads text, or images of a shape that it does not take.
    """
    if not backend.reads_images(model):
        raise PromptError(
            "the model reads text, not images. Make its prompts with tokenize or prompts_from_ids."
        )
    channels, height, width, patch = backend.image_shape(model.original_model.config)
    if not isinstance(pixels, Tensor) or not pixels.is_floating_point():
        kind = pixels.dtype if isinstance(pixels, Tensor) else type(pixels).__name__
        raise PromptError(
            f"pixels are {kind}; the model takes a float tensor of normalised images. Use its "
            'image processor with return_tensors="pt", and take "pixel_values".'
        )
    if pixels.ndim != 4 or not len(pixels) or pixels.shape[1:] != (channels, height, width):
        raise PromptError(
            f"pixels have shape {tuple(pixels.shape)}; the model takes [batch, {channels}, "
            f"{height}, {width}] (batch, channel, height, width). Use its image processor."
        )
    parameter = next(model.parameters())
    pixels = pixels.detach().to(parameter.device, parameter.dtype)
    if not pixels.isfinite().all():
        raise PromptError(
            f"pixels hold NaN or infinity in {parameter.dtype}. Check the images and their "
            "processing."
        )
    positions = backend.image_positions(model, pixels)
    columns = width // patch
    patches = height // patch * columns
    names = ["CLS", *(f"R{n}" for n in range(1, positions))][: positions - patches]
    names += [f"{n // columns},{n % columns}" for n in range(patches)]
    checksums = [zlib.crc32(image.float().cpu().numpy().tobytes()) for image in pixels]
    ids = torch.tensor(checksums)[:, None] + torch.arange(positions)
    ids = ids.to(parameter.device)
    return Prompts(
        ids=ids,
        mask=torch.ones_like(ids, dtype=torch.bool),
        tokens=(tuple(names),) * len(pixels),
        bos=(False,) * len(pixels),
        pixels=pixels,
    )
