"""The proof that a wrapped model computes what Hugging Face's own does, on a small input."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cw_lens.backend import Inputs, forward, image_shape, main_input
from cw_lens.model_paths import ModelLoadError, first_line

LENGTH = 8


@dataclass(frozen=True, eq=False)
class Trial:
    """Two inputs that differ in their last token alone, and a model's logits on them.

    Attributes:
        inputs: ids with a mask, or images.
        expected: Hugging Face's logits before anything wraps it; None where it makes none of one
            input alone (an encoder with a decoder, a bare encoder).
    """

    inputs: Inputs
    expected: Tensor | None


def trial(hf_model: Any) -> Trial:
    """The trial of a Hugging Face model that nothing has wrapped yet.

    Raises:
        ModelLoadError: it does not run in Hugging Face's own code.
    """
    config, parameter = hf_model.config, next(hf_model.parameters())
    if main_input(hf_model) == "pixel_values":
        shape = (2, *image_shape(config)[:3])
        pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        ids = torch.zeros(2, 1, dtype=torch.long, device=parameter.device)
        inputs = Inputs(ids, ids == 0, pixels=pixels.to(parameter.device, parameter.dtype))
        arguments: dict[str, Any] = {"pixel_values": inputs.pixels}
    else:
        vocabulary = getattr(config, "vocab_size", LENGTH)
        ids = torch.arange(min(LENGTH, vocabulary), device=parameter.device).repeat(2, 1)
        ids[1, -1] = 0
        inputs = Inputs(ids, torch.ones_like(ids, dtype=torch.bool))
        arguments = {"input_ids": ids, "attention_mask": inputs.mask.long()}
    if config.is_encoder_decoder:
        return Trial(inputs, None)
    if hf_model.can_generate():
        arguments["use_cache"] = False
    try:
        with torch.no_grad():
            return Trial(inputs, getattr(hf_model(**arguments), "logits", None))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{type(hf_model).__name__} does not run in Hugging Face's own code: "
            f"{first_line(error)} Check its config (head counts, sizes) against its weights."
        ) from error


def difference(model: Any, held: Trial, tolerance: float) -> str:
    """How the wrapped model's logits differ from those expected; empty where they do not."""
    if held.expected is None:
        return ""
    with torch.no_grad():
        found = forward(model, held.inputs)
    largest = held.expected.abs().max().clamp_min(1e-30)
    miss = ((found - held.expected).abs().max() / largest).item()
    if not miss <= tolerance:
        return f"its logits are {miss:.2g} off (relative)"
    if sees_ahead(held.inputs, found) != sees_ahead(held.inputs, held.expected):
        return "it differs in whether a token sees those after it"
    return ""


def sees_ahead(inputs: Inputs, logits: Tensor) -> bool:
    """Whether the last token changes the logits before it, by more than rounding."""
    if inputs.pixels is not None:
        return True
    moved = (logits[0, :-1] - logits[1, :-1]).abs().max()
    return bool(moved > 1e-5 * logits.abs().max())
