"""Writing into attention while a model runs: scale or mask what single values give (SPEC 6).

Context managers: the hooks are ours alone and gone afterwards, also after an exception. A write
names query heads, and reaches those alone also where heads share values.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cw_lens import backend
from cw_lens.errors import CWLensError, InputError
from cw_lens.sites import AttentionSite, UnsupportedModelError, attention_layers, attention_sites

Where = Mapping[int, Bool[Tensor, "batch head key"]]

ROUTES = {
    "z": "at hook_z",
    "output": "at what the attention module returns",
    "value": "at the values",
}
"""Where a write goes in, in order of preference; all change the output by the same amount."""

# the edits open at a site, in the order in which they write: each counts what those before leave
_open_edits: "WeakKeyDictionary[nn.Module, list[_Edit]]" = WeakKeyDictionary()
# a short pass that looks for routes runs clean, also inside an open context
_looking: ContextVar[bool] = ContextVar("looking", default=False)


class InterventionError(CWLensError, RuntimeError):
    """An intervention that changed nothing."""


@contextmanager
def masked_values(model: Any, where: Where) -> Iterator[None]:
    """Inside, the projected values marked are zero: alpha v is dropped from z, for every query.

    Attention is not renormalised. Raises, routes and nesting: as `scaled_values`.
    """
    with scaled_values(model, 0.0, where):
        yield


@contextmanager
def scaled_values(model: Any, factor: float, where: Where) -> Iterator[None]:
    """Inside, the projected values marked are multiplied: alpha v becomes factor * alpha v.

    z' = z - (1 - factor) sum over the marked keys of alpha v, in the query heads marked and for
    every query; attention stays as it is. Contexts nest, and factors on the same value multiply.
    Where nothing is marked, or the factor is 1, the run is the clean one bit for bit.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        factor: what the values are multiplied by; 0 removes them.
        where: layer -> bool tensor [batch, head, key], True where a query head's value is scaled;
            positions as in the prompts that will be run, padding included. A batch of 1 serves
            every example; negative layers count from the end.

    Raises:
        InputError: a factor that is not finite, a layer without attention, a mask that is no bool
            tensor or of another shape than the pattern.
        UnsupportedModelError: no write reaches the output of a layer.
        InterventionError: when it ends without having changed anything in a layer and an example
            in which values are marked.
    """
    masks = _checked(model, factor, where)
    marked = {layer: mask for layer, mask in masks.items() if factor != 1 and mask.any()}
    if not marked:
        yield
        return
    routes = _found_routes(model, list(marked))
    found = attention_sites(model, list(marked))
    edits = [_Edit(site, marked[site.index], factor) for site in found]
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit.active(*routes[edit.site.index]))
        yield
    for edit in edits:
        edit.require_effect()


def _checked(model: Any, factor: float, where: Where) -> dict[int, Tensor]:
    """The masks by layer from 0, once they and the factor are what they must be."""
    having, total = attention_layers(model), backend.n_layers(model)
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        raise InputError(f"the factor is {factor!r}; it must be a finite number, such as 0 or 0.5.")
    if not isinstance(where, Mapping):
        raise InputError(
            f"where is a {type(where).__name__}; it must map layers to masks, such as "
            "{3: mask} with a bool mask of [batch, head, key]."
        )
    masks = {}
    for layer, mask in where.items():
        whole = isinstance(layer, int) and not isinstance(layer, bool)
        if not whole or layer % total not in having or not -total <= layer < total:
            raise InputError(
                f"layer {layer} has no attention to write into; those that have are "
                f"{', '.join(map(str, having))}."
            )
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 3:
            kind = (
                f"a {mask.dtype} tensor of shape {tuple(mask.shape)}"
                if isinstance(mask, Tensor)
                else f"a {type(mask).__name__}"
            )
            raise InputError(
                f"layer {layer}: the mask is {kind}; it must be a torch.bool tensor of "
                "[batch, head, key], True where a value is to change."
            )
        masks[layer % total] = mask
    return masks


def write_routes(model: Any, layers: list[int]) -> dict[int, str]:
    """For each layer, where a write to its values reaches its output; found in a short pass.

    "z" where the pattern is known before z, "output" where the attention module returns the
    output matrix's output, "value" where each head has its own values.

    Raises:
        UnsupportedModelError: none of these; the message names the layer.
    """
    return {layer: route for layer, (route, _heads) in _found_routes(model, layers).items()}


def _found_routes(model: Any, layers: list[int]) -> dict[int, tuple[str, int]]:
    """Route and number of query heads of each layer."""
    order: dict[int, list[str]] = {layer: [] for layer in layers}
    seen: dict[int, dict[str, Any]] = {layer: {} for layer in layers}
    sites = attention_sites(model, layers)

    def note(layer: int, part: str) -> Callable[[Any], None]:
        def hook(tensor: Any) -> None:
            order[layer].append(part)
            seen[layer][part] = tensor

        return hook

    points = [
        (point, note(site.index, part))
        for site in sites
        for part, point in {**site.points, "module": site.attention}.items()
    ]
    token = _looking.set(True)
    try:
        with torch.no_grad(), backend.hooked(points):
            backend.forward(model, backend.short_inputs(model))
    finally:
        _looking.reset(token)
    return {site.index: _route(site, order[site.index], seen[site.index]) for site in sites}


def _route(site: AttentionSite, order: list[str], seen: dict[str, Any]) -> tuple[str, int]:
    missing = [part for part in ("pattern", "value", "z", "output") if part not in seen]
    if not missing:
        heads = seen["pattern"].shape[1]
        if order.index("pattern") < order.index("z"):
            return "z", heads
        if torch.equal(_first(seen["module"]), seen["output"]):
            return "output", heads
        if site.arranged(seen)["value"].shape[1] == heads:
            return "value", heads
    why = (
        f"its {', '.join(missing)} never shows"
        if missing
        else "its pattern shows only after it was used, its heads share values, and the attention "
        "module returns more than the output"
    )
    raise UnsupportedModelError(
        f"layer {site.index}: no write to single values reaches the output, because {why}. Leave "
        "the layer out; reading it is not affected."
    )


class _Edit:
    """Scaled values at one site, from the hooks that see its parts to the one that writes."""

    def __init__(self, site: AttentionSite, mask: Bool[Tensor, "batch head key"], factor: float):
        self.site = site
        self.factors = torch.ones(mask.shape).masked_fill(mask.cpu(), factor)
        self.seen: dict[str, Tensor] = {}
        self.route = ""
        self.changed: Tensor | None = None  # by example, once the model has run

    @contextmanager
    def active(self, route: str, heads: int) -> Iterator[None]:
        """Hooks in place, and known to the edits opened inside."""
        self.route = route
        points = self.site.points
        hooks: list[tuple[nn.Module, Callable[[Any], Any]]]
        if route == "value":
            hooks = [
                (points["value"], partial(self._write_value, heads)),
                (points["pattern"], self._note_weight),
            ]
        else:
            parts = [part for part in ("value", "pattern", "gate") if part in points]
            hooks = [(points[part], partial(self._keep, part)) for part in parts]
            write = (points["z"], self._write_z)
            hooks.append(write if route == "z" else (self.site.attention, self._write_output))
        hooks = [(point, _unless_looking(function)) for point, function in hooks]
        opened = _open_edits.setdefault(self.site.attention, [])
        opened.append(self)
        try:
            with backend.hooked(hooks):
                yield
        finally:
            opened.remove(self)

    def _keep(self, part: str, tensor: Tensor) -> None:
        self.seen[part] = tensor

    def _write_value(self, heads: int, value: Tensor) -> Tensor:
        self._require_shape(len(value), heads, value.shape[1])
        factor = rearrange(self.factors, "batch head key -> batch key head 1").to(value)
        split = value.flatten(2).unflatten(-1, (heads, -1))
        return (split * factor).reshape(value.shape)

    def _note_weight(self, pattern: Tensor) -> None:
        """Whether any value scaled was read; the pattern shows after the values."""
        scaled = (self.factors != 1).to(pattern.device)[:, :, None]
        self._note(pattern.masked_fill(~scaled, 0.0))

    def _write_z(self, z: Tensor) -> Tensor:
        lost = self._lost()
        self._note(lost)
        lost = rearrange(lost, "batch head query d -> batch query head d")
        return (z.to(lost) - lost.reshape(z.shape)).to(z)

    def _write_output(self, returned: Any) -> Any:
        lost = self._lost()
        self._note(lost)
        written = _without(_first(returned), self.site, lost)
        return (written, *returned[1:]) if isinstance(returned, tuple) else written

    def _note(self, change: Tensor) -> None:
        changed = (change != 0).flatten(1).any(dim=1).cpu()
        if self.changed is not None and self.changed.shape == changed.shape:
            changed = changed | self.changed
        self.changed = changed

    def require_effect(self) -> None:
        """Refuses an edit that, now that it closes, left an example as it was.

        Raises:
            InterventionError: naming layer and example.
        """
        if self.changed is None:
            why, what = "the model was not run inside", "Run the model inside the context."
        else:
            marked = (self.factors != 1).flatten(1).any(dim=1).expand(len(self.changed))
            idle = (marked & ~self.changed).nonzero().flatten().tolist()
            if not idle:
                return
            why = f"no value marked in example {idle[0]} has any weight"
            what = "Mark real keys that queries attend to."
        raise InterventionError(
            f"layer {self.site.index}: scaling values changed nothing, because {why}. {what}"
        )

    def _lost(
        self, parts: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "batch head query d_head"]:
        """What z loses: (1 - factor) alpha v of the keys marked, of what edits before leave."""
        parts = parts or self.site.arranged(self.seen)
        pattern, value = parts["pattern"], parts["value"]
        heads = pattern.shape[1]
        self._require_shape(len(pattern), heads, pattern.shape[3])
        dtype = torch.promote_types(pattern.dtype, torch.float32)
        loss = (1 - self.factors).to(pattern.device, dtype)
        opened = _open_edits[self.site.attention]
        for before in opened[: opened.index(self)]:
            loss = loss * before.factors.to(loss)
        value = value.to(dtype).repeat_interleave(heads // value.shape[1], dim=1)
        # padded values may hold anything: those not marked must not come in
        value = torch.where(loss[..., None] == 0, 0.0, value * loss[..., None])
        lost = pattern.to(dtype) @ value
        if "gate" in parts:
            lost = lost * parts["gate"].to(dtype)
        return lost

    def _require_shape(self, batch: int, heads: int, keys: int) -> None:
        shape = tuple(self.factors.shape)
        if shape[0] not in (1, batch) or shape[1:] != (heads, keys):
            raise InputError(
                f"layer {self.site.index}: the mask has shape {shape}, the run has "
                f"{(batch, heads, keys)} (batch, head, key). Mark [batch, head, key] of the "
                "prompts that are run, query heads each on their own."
            )


def _unless_looking(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda seen: None if _looking.get() else function(seen)


def as_written(site: AttentionSite, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was read of a layer, as the writes open at it leave it: values scaled, z to match.

    The attention weights stay what they were; a value that is scaled by 0 gives nothing.
    """
    edits = _open_edits.get(site.attention, [])
    edits = [edit for edit in edits if edit.route != "value"]  # those change the values themselves
    if not edits:
        return parts
    pattern, value, dtype = parts["pattern"], parts["value"], parts["z"].dtype
    z, output = parts["z"], parts.get("output")
    for edit in edits:
        if edit.route == "output":  # written behind the points that were read
            lost = edit._lost(parts)
            edit._note(lost)  # a reading pass may end before the write
            z = (z.to(lost) - lost).to(dtype)
            if output is not None:
                output = _without(output, site, lost)
    value = value.repeat_interleave(pattern.shape[1] // value.shape[1], dim=1)
    for edit in edits:
        factors = edit.factors.to(pattern.device, torch.promote_types(dtype, torch.float32))
        value = value.to(factors.dtype) * factors[..., None]
    written = {**parts, "value": value, "z": z}
    return written if output is None else {**written, "output": output}


def _without(
    output: Tensor, site: AttentionSite, lost: Float[Tensor, "batch head query d_head"]
) -> Tensor:
    """The layer's output, less what a part of z wrote into it."""
    W_O = site.W_O(lost.shape[1]).to(lost)
    unwritten = einsum(lost, W_O, "batch head query d, head d m -> batch query m")
    return (output.to(unwritten) - unwritten.reshape(output.shape)).to(output)


def _first(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned
