"""What a model's name means: a folder, a .gguf file or a name on the Hugging Face hub."""

from pathlib import Path

from cw_lens.errors import CWLensError
from cw_lens.weights import EMBEDDED_MODEL

HUB_SECONDS = 10


class ModelLoadError(CWLensError, RuntimeError):
    """A model that cannot be loaded; the message says why and what to do."""


def located(name: str) -> tuple[str, str | None]:
    """A folder or hub name, and the GGUF file in it if that is what was named.

    Raises:
        ModelLoadError: no such path, no GGUF file, or a folder without config.json.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
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


def hub_silence(name: str) -> str | None:
    """Why the hub cannot be asked for this model, or None when it answers, if only to refuse.

    One question with a time limit: transformers' own loaders repeat theirs for half a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    except HfHubHTTPError:
        return None
    except Exception as error:  # noqa: BLE001 - its HTTP library, and so its errors, has changed
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError):
        said = f"{type(error).__name__} {error}"
    elif len(lines) > 1 and lines[0].endswith(":"):
        said = f"{lines[0]} {lines[1]}"
    else:
        said = lines[0] if lines else type(error).__name__
    return said if said.endswith((".", "!")) else said + "."
