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

from cw_lens.identity import first_not_finite
from cw_lens.model_paths import ModelLoadError, first_line
from cw_lens.trials import Trial, difference, sees_ahead, trial


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
    if any(hasattr(module, "original_component") for module in hf_model.modules()):
        raise ModelLoadError(
            f"this {type(hf_model).__name__} is wrapped already, and wrapping it again would break "
            "the first. Use the model that wrap_model returned."
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
        held = trial(hf_model)
        try:
            model = None if _is_four() else _hooked_transformer(hf_model, held)
            model = model or _bridge(hf_model)
            model.eval()
            wrong = difference(model, held, _tolerance(hf_model))
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ModelLoadError(
                f"TransformerLens {version('transformer-lens')} cannot wrap "
                f"{config.architectures[0]}: {first_line(error)} Use an architecture that it "
                "supports, or a later version of it."
            ) from error
    if wrong:
        raise ModelLoadError(
            f"TransformerLens {version('transformer-lens')} does not run {config.architectures[0]} "
            f"as Hugging Face does: {wrong}. Use another version of transformer-lens or "
            "transformers."
        )
    if held.expected is not None:
        model.sees_ahead = sees_ahead(held.inputs, held.expected)
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


def _tolerance(hf_model: Any) -> float:
    """Largest relative difference of logits that is rounding.

    Falcon's ALiBi is rounded to bfloat16 by Hugging Face and not by TransformerLens.
    """
    if hf_model.dtype not in (torch.float32, torch.float64):
        return 0.1
    return 2e-2 if getattr(hf_model.config, "alibi", False) else 1e-3


def _window(config: Any) -> int | None:
    """The sliding window of a Hugging Face config, or None where no layer slides."""
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True)
    if kinds is not None:
        slides = "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) if slides else None


def _hooked_transformer(hf_model: Any, held: Trial) -> Any:
    """transformer-lens 3.9's own model with these weights, or None where it cannot hold them.

    Its converters drop what they do not know (the biases of a Llama's attention, the sliding
    window of a Qwen 2, which is longer than a trial), so logits and window must be those of the
    model it was made from.
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
    if (cfg.window_size if cfg.use_local_attn else None) != _window(hf_model.config):
        return None
    cfg.tokenizer_name = None  # else it loads one by name
    model = transformer_lens.HookedTransformer(cfg, move_to_device=False)
    try:
        model.load_state_dict(loading.fill_missing_keys(model, state), strict=False)
    except RuntimeError:  # sizes that its config takes for granted
        return None
    torch.nn.Module.to(model, parameter.device)  # its own .to() prints
    return None if difference(model.eval(), held, _tolerance(hf_model)) else model


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
