"""What a loaded model is: its shape, versions, weight state and the hash of its weights."""

import hashlib
from importlib.metadata import version
from typing import Any

import torch

from cw_lens.sites import attention_layers, weight_state


def model_identity(model: Any) -> dict[str, Any]:
    """What a result must record of the model that it came from, ready for JSON."""
    cfg = model.cfg
    parameter = next(model.parameters())
    groups = getattr(cfg, "n_key_value_heads", None)
    architecture = getattr(cfg, "architecture", None) or getattr(cfg, "original_architecture", None)
    return {
        "name": getattr(cfg, "model_name", None),
        "class": type(model).__name__,
        "architecture": architecture,
        "n_layers": int(cfg.n_layers),
        "layers_without_attention": sorted(set(range(cfg.n_layers)) - set(attention_layers(model))),
        "n_heads": int(cfg.n_heads),
        "n_key_value_heads": int(groups or cfg.n_heads),
        "d_model": int(cfg.d_model),
        "d_head": int(cfg.d_head),
        "d_vocab": int(cfg.d_vocab),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "weights": ", ".join(weight_state(model)),
        "weight_hash": weight_hash(model),
        "transformer_lens": version("transformer-lens"),
    }


def weight_hash(model: Any) -> str:
    """sha256 of the parameters' names, shapes, dtypes and bytes, in the order of their names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        data = parameter.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(data.shape)} {data.dtype}".encode())
        digest.update(data.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def first_not_finite(model: Any) -> str | None:
    """The name of the first parameter that holds NaN or infinity, or None."""
    for name, parameter in model.named_parameters():
        # a finite float64 sum proves finite terms; only an infinite one needs a closer look
        finite = parameter.detach().sum(dtype=torch.float64).isfinite()
        if not finite and not parameter.detach().isfinite().all():
            return name
    return None
