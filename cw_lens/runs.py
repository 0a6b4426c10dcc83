"""Reading a model: one forward pass in, frozen attention layers out, each proved to add up."""

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from cw_lens import backend, sites
from cw_lens.certificates import SPACES, Certificate, certified_layer
from cw_lens.edits import as_written
from cw_lens.errors import CWLensWarning, InputError, require_known
from cw_lens.layer import LayerAttention
from cw_lens.prompts import Prompts
from cw_lens.sites import AttentionSite

Result = TypeVar("Result")


class LowOutputWarning(CWLensWarning):
    """Some queries have outputs so small that shares of them mean little."""


@dataclass(frozen=True, eq=False)
class Run(Generic[Result]):
    """What one forward pass showed.

    Attributes:
        prompts: what the model was given.
        layers: per layer read, in order, its `LayerAttention`, or what `reduce` made of it.
        certificates: per layer read, in order; each names its layer.
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
    space: str = "residual",
    allow_folded: bool = False,
) -> Run[Any]:
    """Attention layers of one forward pass, each certified: sum of alpha v W_O is its output.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        prompts: from `tokenize`.
        layers: the layers to read, by default all that have attention; negative numbers count
            from the end.
        reduce: applied to each layer inside the pass; the layer is dropped before the next one,
            so that memory is one layer's. Without it the layers themselves are kept.
        gradient: also take `z_gradient`, with a forward and a backward pass before this one.
        space: where a norm follows the output matrix, "residual" measures contributions behind it,
            where they act, and "attention" before it; the same on other architectures (SPEC 1).
        allow_folded: read a model whose value biases have been folded into the output bias, which
            changes every contribution.

    Raises:
        InputError: a layer that the model does not have, an unknown space, folded value biases.
        IdentityError: a layer's parts do not add up, or padding received attention.
        UnsupportedModelError: a layer whose attention cannot be read.

    Warns:
        LowOutputWarning: where outputs lie below the floor (see `low_outputs`).
    """
    require_prompts(model, prompts)
    indices = layer_indices(model, layers)
    found = attention_sites(model, indices, space=space, allow_folded=allow_folded)
    gradients: dict[int, Tensor] = {}
    if gradient:
        gradients = backend.z_gradients(model, prompts, found)
    results: dict[int, Any] = {}
    certificates: dict[int, Certificate] = {}

    def receive(site: AttentionSite, parts: dict[str, Tensor]) -> None:
        layer, certificate = certified_layer(site, as_written(site, parts), prompts, space)
        if gradient:
            z_gradient = site.by_head("z", gradients.pop(site.index), layer.z.shape[1])
            layer = replace(layer, z_gradient=z_gradient.to(layer.z.dtype))
        results[site.index] = layer if reduce is None else reduce(layer)
        certificates[site.index] = certificate

    backend.read(model, prompts, found, receive)
    return _run(prompts, indices, results, certificates)


def from_cache(
    cache: Any,
    model: Any,
    prompts: Prompts,
    *,
    space: str = "residual",
    allow_folded: bool = False,
) -> Run[LayerAttention]:
    """Attention layers of a TransformerLens `ActivationCache`, certified as `capture` does.

    The cache must come from these prompts (with their padding mask) and hold `hook_pattern`,
    `hook_v`, `hook_z` and `hook_resid_pre`, and what else an architecture needs (its refusal
    names it); the attention's output is checked where it is held. Layers without a `hook_pattern`
    in the cache are left out.

    Args:
        space, allow_folded: as `capture`.

    Raises:
        InputError: nothing usable in the cache, shapes that are not the prompts', an unknown
            space, or folded value biases.
        IdentityError: a layer's parts do not add up.
    """
    require_prompts(model, prompts)
    held = getattr(cache, "cache_dict", cache)
    if not isinstance(held, Mapping):
        raise InputError(
            f"cache is a {type(cache).__name__}; it must be the ActivationCache that "
            "model.run_with_cache returns, or a mapping of its names."
        )
    indices = [
        index
        for index in sites.attention_layers(model)
        if sites.cache_names(model, index)["pattern"] in held
    ]
    if not indices:
        raise InputError(
            "the cache holds no hook_pattern of any layer. Cache hook_pattern, hook_v, hook_z and "
            "hook_resid_pre, or read the model with capture(model, prompts)."
        )
    results: dict[int, Any] = {}
    certificates: dict[int, Certificate] = {}
    for site in attention_sites(model, indices, space=space, allow_folded=allow_folded):
        seen = {}
        for part, name in sites.cache_names(model, site.index).items():
            if name in held:
                seen[part] = held[name]
            elif part != "output":
                raise InputError(f"layer {site.index}: the cache holds no {name}; cache it too.")
        _require_shapes(site, seen, prompts)
        results[site.index], certificates[site.index] = certified_layer(
            site, site.arranged(seen), prompts, space
        )
    return _run(prompts, indices, results, certificates)


def next_token_nll(model: Any, prompts: Prompts) -> Float[Tensor, "batch predicted"]:
    """Loss in nats of each real token from the second on; 0 at padding.

    Position j of the result is the loss of position j + 1 of the prompt.

    Raises:
        UnsupportedModelError: the model does not predict the next token.
    """
    require_prompts(model, prompts)
    with torch.no_grad():
        return backend.next_token_nll(model, prompts)


def require_prompts(model: Any, prompts: Any) -> None:
    """Refuses what is not made of `tokenize` and the like, or for another kind of model.

    Raises:
        InputError: naming what to make the prompts with.
        UnsupportedModelError: the model is an encoder with a decoder.
    """
    sites.attention_layers(model)
    maker = "prompts_from_images" if backend.reads_images(model) else "tokenize"
    if not isinstance(prompts, Prompts) or (prompts.pixels is None) == backend.reads_images(model):
        kind = "those of another kind of model"
        if not isinstance(prompts, Prompts):
            kind = f"a {type(prompts).__name__}"
        raise InputError(
            f"the prompts are {kind}. Make them for this model with {maker}(model, ...)."
        )


def _require_shapes(site: AttentionSite, seen: Mapping[str, Tensor], prompts: Prompts) -> None:
    """Refuses cached parts that are not of these prompts."""
    batch, positions = prompts.ids.shape
    for part, tensor in seen.items():
        dims = {"pattern": (0, 2, 3), "value": (0, 2) if site.heads_first else (0, 1)}
        at = dims.get(part, (0, 1))
        expected = (batch, *(positions for _ in at[1:]))
        whole = isinstance(tensor, Tensor) and tensor.ndim > max(at) and tensor.is_floating_point()
        if not whole or tuple(tensor.shape[i] for i in at) != expected:
            raise InputError(
                f"layer {site.index}: the cached {part} has shape {tuple(tensor.shape)}, the "
                f"prompts have {batch, positions} (batch, position). Cache these prompts' ids."
            )


def layer_indices(model: Any, layers: Sequence[int] | None) -> list[int]:
    """The layers asked for as numbers from 0, in order, each once; all with attention by default.

    Raises:
        InputError: a layer that the model does not have; the message names those it has.
        UnsupportedModelError: a layer without attention, or a model without any.
    """
    having = sites.attention_layers(model)
    if layers is None:
        return having
    total = backend.n_layers(model)
    try:
        given = list(layers)
        if any(isinstance(layer, bool) for layer in given):
            raise TypeError("True is no layer")
        layers = [operator.index(layer) for layer in given]
    except TypeError as error:
        raise InputError(
            f"layers is {layers!r}; it must hold whole numbers from 0 to {total - 1}, "
            "such as [0, -1]."
        ) from error
    wrong = [index for index in layers if not -total <= index < total]
    if wrong or not layers:
        what = f"layer {wrong[0]} does not exist" if wrong else "no layers asked for"
        raise InputError(f"{what}: the model has layers 0 to {total - 1} (or -{total} to -1).")
    indices = sorted({index % total for index in layers})
    for index in indices:
        if index not in having:
            sites.attention_site(model, index)  # says why
    return indices


def attention_sites(
    model: Any, indices: Sequence[int], *, space: str, allow_folded: bool
) -> list[AttentionSite]:
    """The attention of each of these layers, where it may be read in that space.

    Raises:
        InputError: an unknown space, or folded value biases that are not allowed.
        UnsupportedModelError: a layer whose attention cannot be read.
    """
    require_known("space", space, SPACES)
    found = sites.attention_sites(model, indices)
    sites.require_unfolded(found, allow_folded=allow_folded)
    return found


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
