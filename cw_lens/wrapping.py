"""A Hugging Face model in memory to a TransformerLens model, proved to compute the same."""

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cw_lens.backend import image_shape
from cw_lens.identity import first_not_finite
from cw_lens.model_paths import ModelLoadError, first_line


def wrap_model(hf_model: Any, tokenizer: Any = None) -> Any:
    """A TransformerLens model around a Hugging Face model in memory.

    It shares the model's parameters (transformer-lens 4; 3.9's HookedTransformer copies them),
    moves and casts nothing, and switches it to eager attention and evaluation mode in place.
    Without a tokenizer it takes token ids only (`prompts_from_ids`).

    Raises:
        ModelLoadError: no Hugging Face model, parameters without values or with values that are
            not finite, an architecture without an adapter, or one that TransformerLens runs to
            other logits than Hugging Face.
    """
    if not hasattr(hf_model, "set_attn_implementation"):
        raise ModelLoadError(
            f"wrap_model takes a Hugging Face model in memory, not a {type(hf_model).__name__}. "
            "Use load_model for a name or a path; a TransformerLens model needs no wrapping."
        )
    empty = [name for name, parameter in hf_model.named_parameters() if parameter.is_meta]
    if empty:
        raise ModelLoadError(
            f"parameter {empty[0]} is on the meta device and has no values. Load the model onto "
            "cpu, or a device that torch sees."
        )
    bad = first_not_finite(hf_model)
    if bad is not None:
        raise ModelLoadError(
            f"parameter {bad} holds values that are NaN or infinite. The weights are damaged, or "
            "overflowed in their dtype; load them anew."
        )
    config = hf_model.config
    if not config.architectures:
        config.architectures = [type(hf_model).__name__]
    hf_model.eval()
    hf_model.set_attn_implementation("eager")
    with quiet():
        trial, expected = _trial(hf_model)
        try:
            model = None if _is_four() else _hooked_transformer(hf_model, trial, expected)
            model = model or _bridge(hf_model)
            miss = _logits_miss(model, trial, expected)
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"TransformerLens {version('transformer-lens')} cannot wrap "
                f"{config.architectures[0]}: {first_line(error)} Use an architecture that it "
                "supports, or a later version of it."
            ) from error
    if not miss <= _logits_tolerance(hf_model):
        raise ModelLoadError(
            f"TransformerLens {version('transformer-lens')} does not run {config.architectures[0]} "
            f"as Hugging Face does: its logits are {miss:.2g} off (relative). Use another version "
            "of transformer-lens or transformers."
        )
    model.tokenizer = tokenizer
    model.cfg.tokenizer_prepends_bos = tokenizer is not None and _prepends_bos(tokenizer)
    return model


def _is_four() -> bool:
    return int(version("transformer-lens").split(".")[0]) >= 4


def _bridge(hf_model: Any) -> Any:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    # boot_transformers would load a tokenizer by name and may move the model; this does neither
    architecture = hf_model.config.architectures[0]
    return build_bridge_from_module(hf_model, architecture, hf_config=hf_model.config)


def _trial(hf_model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A small input, and the model's own logits on it before anything wraps it.

    None where it makes no logits of one input alone: an encoder with a decoder, a bare encoder.
    """
    config, parameter = hf_model.config, next(hf_model.parameters())
    if hf_model.main_input_name == "pixel_values":
        shape = (1, *image_shape(config)[:3])
        trial = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        trial = trial.to(parameter.device, parameter.dtype)
    else:
        length = min(8, getattr(config, "vocab_size", 8))
        trial = torch.arange(length, device=parameter.device)[None]
    if config.is_encoder_decoder:
        return trial, None
    options = {"use_cache": False} if hf_model.can_generate() else {}
    try:
        with torch.no_grad():
            return trial, getattr(hf_model(trial, **options), "logits", None)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{type(hf_model).__name__} does not run in Hugging Face's own code: "
            f"{first_line(error)} Check its config (head counts, sizes) against its weights."
        ) from error


def _logits_miss(model: Any, trial: torch.Tensor, expected: torch.Tensor | None) -> float:
    """Largest difference of the logits from those expected, relative to the largest of these."""
    model.eval()
    if expected is None:
        return 0.0
    with torch.no_grad():
        found = model(trial, return_type="logits")
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def _logits_tolerance(hf_model: Any) -> float:
    """Falcon's ALiBi, which Hugging Face rounds to bfloat16 and TransformerLens does not, is the
    widest of the known differences that are rounding."""
    exact = hf_model.dtype in (torch.float32, torch.float64)
    return 2e-2 if exact else 0.1


def _hooked_transformer(hf_model: Any, trial: torch.Tensor, expected: torch.Tensor | None) -> Any:
    """transformer-lens 3.9's own model with these weights, or None where it cannot hold them.

    Its converters drop what they do not know (the biases of a Llama's attention, say), so the
    logits must be those of the model it was made from.
    """
    transformer_lens: Any = import_module("transformer_lens")  # 3.9's names, which 4 has not
    loading = transformer_lens.loading_from_pretrained

    parameter = next(hf_model.parameters())
    with tempfile.TemporaryDirectory() as folder:  # its converter reads a folder's config.json
        config = hf_model.config.to_dict()
        if "n_positions" in config:
            config.setdefault("n_ctx", config["n_positions"])  # GPT-2's name for it until 5.x
        (Path(folder) / "config.json").write_text(json.dumps(config, default=str))
        try:
            cfg = loading.get_pretrained_model_config(
                folder, hf_cfg=config, dtype=parameter.dtype, device=parameter.device
            )
            state = loading.get_pretrained_state_dict(folder, cfg, hf_model)
        except (AttributeError, KeyError, NotImplementedError, ValueError):
            return None
    cfg.tokenizer_name = None  # else it loads one by name
    model = transformer_lens.HookedTransformer(cfg, move_to_device=False)
    try:
        model.load_state_dict(loading.fill_missing_keys(model, state), strict=False)
    except RuntimeError:  # sizes that its config takes for granted
        return None
    torch.nn.Module.to(model, parameter.device)  # its own .to() prints
    tolerance = 1e-3 if parameter.dtype in (torch.float32, torch.float64) else 0.1
    return model if _logits_miss(model, trial, expected) <= tolerance else None


def _prepends_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or notices of transformers and TransformerLens; as before afterwards."""
    root_level = logging.getLogger().level
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        from transformers.utils import logging as hf_logging

        level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
        try:
            hf_logging.set_verbosity_error()
            hf_logging.disable_progress_bar()
            logging.getLogger().setLevel(logging.ERROR)
            yield
        finally:
            hf_logging.set_verbosity(level)
            logging.getLogger().setLevel(root_level)
            if bars:
                hf_logging.enable_progress_bar()
