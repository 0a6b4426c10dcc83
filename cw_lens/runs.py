"""Reading a model: one forward pass in, frozen attention layers out, each proved to add up."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens import backend
from cw_lens.errors import CWLensError, CWLensWarning, InputError
from cw_lens.geometry import low_outputs
from cw_lens.layer import LayerAttention, layer_attention
from cw_lens.prompts import Prompts

Result = TypeVar("Result")

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest error of the two identities, by the dtype that the model computes in."""


class IdentityError(CWLensError, RuntimeError):
    """The parts read of a layer do not add up to what the layer computed."""


class LowOutputWarning(CWLensWarning):
    """Some queries have outputs so small that shares of them mean little."""


@dataclass(frozen=True)
class Certificate:
    """How well a layer's parts add up to what the model computed.

    An error is the largest length of a difference over real queries, each relative to the true
    vector's length or, where that is larger, to the layer's median length.

    Attributes:
        layer: the layer's number.
        value_error: of sum over keys of pattern * value, against the model's z.
        output_error: of z W_O + b_O, z rebuilt, against the model's attention output.
        tolerance: what both had to stay within.
        low_outputs: number of real queries whose output is below the layer's floor.
        dtype: the dtype that the model computed in.
    """

    layer: int
    value_error: float
    output_error: float
    tolerance: float
    low_outputs: int
    dtype: str


@dataclass(frozen=True, eq=False)
class Run(Generic[Result]):
    """What one forward pass showed.

    Attributes:
        prompts: what the model was given.
        layers: per layer read, in order, its `LayerAttention`, or what `reduce` made of it.
        certificates: per layer read, in order.
    """

    prompts: Prompts
    layers: tuple[Result, ...]
    certificates: tuple[Certificate, ...]


def capture(
    model: Any,
    prompts: Prompts,
    *,
    layers: Sequence[int] | None = None,
    reduce: Callable[[LayerAttention], Any] | None = None,
    gradient: bool = False,
) -> Run[Any]:
    """Attention layers of one forward pass, each certified: sum of alpha v W_O is its output.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        prompts: from `tokenize`.
        layers: the layers to read, all by default; negative numbers count from the end.
        reduce: applied to each layer inside the pass; the layer is dropped before the next one,
            so that memory is one layer's. Without it the layers themselves are kept.
        gradient: also take `z_gradient`, with a forward and a backward pass before this one.

    Raises:
        InputError: a layer that the model does not have.
        IdentityError: a layer's parts do not add up, or padding received attention.
        UnsupportedModelError: a layer whose attention cannot be read.

    Warns:
        LowOutputWarning: where outputs lie below the floor (see `low_outputs`).
    """
    indices = layer_indices(model, layers)
    sites = [backend.attention_site(model, index) for index in indices]
    gradients: dict[int, Tensor] = {}
    if gradient:
        gradients = backend.z_gradients(model, prompts.ids, prompts.mask, sites)
    results: dict[int, Any] = {}
    certificates: dict[int, Certificate] = {}

    def receive(site: backend.AttentionSite, parts: dict[str, Tensor]) -> None:
        layer, certificate = certified_layer(site, parts, prompts)
        if gradient:
            layer = replace(layer, z_gradient=gradients.pop(site.index).to(layer.z.dtype))
        results[site.index] = layer if reduce is None else reduce(layer)
        certificates[site.index] = certificate

    backend.read(model, prompts.ids, prompts.mask, sites, receive)
    return _run(prompts, indices, results, certificates)


def from_cache(cache: Any, model: Any, prompts: Prompts) -> Run[LayerAttention]:
    """Attention layers of a TransformerLens `ActivationCache`, certified as `capture` does.

    The cache must come from these prompts (with their padding mask) and hold `hook_pattern`,
    `hook_v`, `hook_z` and `hook_resid_pre`; the attention's output is checked where it is held.
    Layers without a `hook_pattern` in the cache are left out.

    Raises:
        InputError: nothing usable in the cache, or shapes that are not the prompts'.
        IdentityError: a layer's parts do not add up.
    """
    held = getattr(cache, "cache_dict", cache)
    indices = [
        index
        for index in range(backend.n_layers(model))
        if backend.cache_names(model, index)["pattern"] in held
    ]
    if not indices:
        raise InputError(
            "the cache holds no hook_pattern of any layer. Cache hook_pattern, hook_v, hook_z and "
            "hook_resid_pre, or read the model with capture(model, prompts)."
        )
    results: dict[int, Any] = {}
    certificates: dict[int, Certificate] = {}
    for index in indices:
        site = backend.attention_site(model, index)
        parts = {}
        for part, name in backend.cache_names(model, index).items():
            if name in held:
                parts[part] = site.shaped(part, held[name])
            elif part != "output":
                raise InputError(f"layer {index}: the cache holds no {name}; cache it too.")
        shape = parts["pattern"].shape
        if (shape[0], shape[-1]) != tuple(prompts.ids.shape):
            raise InputError(
                f"layer {index}: the cached pattern has shape {tuple(shape)}, the prompts have "
                f"{tuple(prompts.ids.shape)} (batch, position). Cache these prompts' ids."
            )
        results[index], certificates[index] = certified_layer(site, parts, prompts)
    return _run(prompts, indices, results, certificates)


def next_token_nll(model: Any, prompts: Prompts) -> Float[Tensor, "batch predicted"]:
    """Loss in nats of each real token from the second on; 0 at padding.

    Position j of the result is the loss of position j + 1 of the prompt.
    """
    with torch.no_grad():
        logits = backend.forward(model, prompts.ids, prompts.mask)
    return backend.next_token_nll(logits, prompts.ids, prompts.mask)


def layer_indices(model: Any, layers: Sequence[int] | None) -> list[int]:
    """The layers asked for as numbers from 0, in order, each once.

    Raises:
        InputError: a layer that the model does not have; the message names those it has.
    """
    total = backend.n_layers(model)
    if layers is None:
        return list(range(total))
    wrong = [index for index in layers if not -total <= index < total]
    if wrong or not len(layers):
        what = f"layer {wrong[0]} does not exist" if wrong else "no layers asked for"
        raise InputError(f"{what}: the model has layers 0 to {total - 1} (or -{total} to -1).")
    return sorted({index % total for index in layers})


def certified_layer(
    site: backend.AttentionSite, parts: dict[str, Tensor], prompts: Prompts
) -> tuple[LayerAttention, Certificate]:
    """A layer from the parts that a forward pass showed, and the proof that they add up.

    Raises:
        IdentityError: naming the layer, the size of the miss and its likely causes.
    """
    pattern = parts["pattern"]
    device = pattern.device
    mask = prompts.mask.to(device)
    layer = layer_attention(
        site.index,
        pattern,
        parts["value"],
        W_O=site.W_O.detach().to(device),
        b_O=None if site.b_O is None else site.b_O.detach().to(device),
        residual=parts["residual"],
        ids=prompts.ids.to(device),
        mask=mask,
        causal=site.causal,
    )
    tolerance = TOLERANCE[pattern.dtype]
    if not mask.all():
        leaked = pattern.float().masked_fill(mask[:, None, None, :], 0.0).sum(dim=-1)
        leaked = leaked.masked_fill(~mask[:, None, :], 0.0).max().item()
        if not leaked <= tolerance:
            raise IdentityError(
                f"layer {site.index}: a real query gives {leaked:.2g} of its attention to padding. "
                "The model ignores the padding mask; run its texts one by one."
            )
    value_error = _relative_miss(layer.z, parts["z"].to(layer.z.dtype), layer.mask[:, None])
    if not value_error <= tolerance:
        raise IdentityError(
            f"layer {site.index}: sum of alpha v misses hook_z by {value_error:.2g} (relative; "
            f"tolerance {tolerance:.0e}). Likely causes: NaN or infinite weights, a gate, clamp or "
            "norm on the values that hook_v does not show, grouped values in another order, "
            "or a hook of yours that writes."
        )
    output_error = 0.0
    if "output" in parts:
        rebuilt = layer.output if layer.b_O is None else layer.output + layer.b_O
        output_error = _relative_miss(rebuilt, parts["output"].to(rebuilt.dtype), layer.mask)
    if not output_error <= tolerance:
        raise IdentityError(
            f"layer {site.index}: z W_O + b_O misses the attention's output by {output_error:.2g} "
            f"(relative; tolerance {tolerance:.0e}). Likely causes: NaN or infinite weights, a "
            "norm or gate between z and the output matrix, an output that is scaled or already "
            "holds the residual, processed weights, or a hook of yours that writes."
        )
    certificate = Certificate(
        layer=site.index,
        value_error=value_error,
        output_error=output_error,
        tolerance=tolerance,
        low_outputs=int(low_outputs(layer).sum()),
        dtype=str(pattern.dtype).removeprefix("torch."),
    )
    return layer, certificate


def _relative_miss(
    rebuilt: Float[Tensor, "*axes d"], true: Float[Tensor, "*axes d"], real: Bool[Tensor, "*some"]
) -> float:
    """Largest length of rebuilt - true over real vectors, as `Certificate` measures it."""
    length = true.norm(dim=-1)
    real = real.expand(length.shape)
    median = length[real].median()
    miss = (rebuilt - true).norm(dim=-1) / length.maximum(median).clamp_min(1e-30)
    return miss.masked_fill(~real, 0.0).max().item()


def _run(
    prompts: Prompts,
    indices: Sequence[int],
    results: dict[int, Any],
    certificates: dict[int, Certificate],
) -> Run[Any]:
    low = {i: c.low_outputs for i, c in certificates.items() if c.low_outputs}
    if low:
        warnings.warn(
            f"{sum(low.values())} outputs in layers {', '.join(map(str, low))} are below the "
            "floor: their shares are taken of the floor, not of the output, and do not sum to 1. "
            "low_outputs(layer) marks them, projections(layer) gives what they are made of.",
            LowOutputWarning,
            stacklevel=3,
        )
    return Run(
        prompts=prompts,
        layers=tuple(results[index] for index in indices),
        certificates=tuple(certificates[index] for index in indices),
    )
