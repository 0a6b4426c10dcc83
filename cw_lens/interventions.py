"""Writing into attention while a model runs: scale or mask what single values give (SPEC 6).

Context managers: the hooks are ours alone and gone afterwards, also after an exception. A write
names query heads, and reaches those alone also where heads share values.
"""

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
from cw_lens.sites import AttentionSite, UnsupportedModelError, attention_layers, attention_site

Where = Mapping[int, Bool[Tensor, "batch head key"]]

ROUTES = {
    "z": "at hook_z",
    "output": "at what the attention module returns",
    "value": "at the values",
}
"""Where a write goes in, in order of preference; all change the output by the same amount."""

# factors that open contexts apply at a site, so that one inside another counts what is left
_open_factors: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()
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
        where: layer -> [batch, head, key], True where a query head's value is scaled; positions
            as in the prompts that will be run, padding included. A batch of 1 serves every
            example.

    Raises:
        InputError: a layer without attention, or a mask of another shape than the pattern.
        UnsupportedModelError: no write reaches the output of a layer.
        InterventionError: when it ends without having changed anything, though values are marked.
    """
    having = attention_layers(model)
    for layer in where:
        if layer not in having:
            raise InputError(
                f"layer {layer} has no attention to write into; those that have are "
                f"{', '.join(map(str, having))}."
            )
    marked = {layer: mask for layer, mask in where.items() if factor != 1 and mask.any()}
    if not marked:
        yield
        return
    routes = _found_routes(model, list(marked))
    edits = [_Edit(attention_site(model, i), mask, factor) for i, mask in marked.items()]
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit.active(*routes[edit.site.index]))
        yield
    if not any(edit.changed for edit in edits):
        ran = any(edit.ran for edit in edits)
        reason = "no value marked has any weight" if ran else "the model was not run inside"
        raise InterventionError(
            f"scaling values in layers {', '.join(map(str, marked))} changed nothing: {reason}. "
            "Run the model inside the context, and mark real keys that queries attend to."
        )


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
    sites = [attention_site(model, layer) for layer in layers]

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
        self.around: list[Tensor] = []
        self.seen: dict[str, Tensor] = {}
        self.ran = False
        self.changed = False

    @contextmanager
    def active(self, route: str, heads: int) -> Iterator[None]:
        """Hooks in place, and known to the edits opened inside."""
        points = self.site.points
        hooks: list[tuple[nn.Module, Callable[[Any], Any]]]
        if route == "value":
            hooks = [(points["value"], partial(self._write_value, heads))]
        else:
            parts = [part for part in ("value", "pattern", "gate") if part in points]
            hooks = [(points[part], partial(self._keep, part)) for part in parts]
            write = (points["z"], self._write_z)
            hooks.append(write if route == "z" else (self.site.attention, self._write_output))
        hooks = [(point, _unless_looking(function)) for point, function in hooks]
        opened = _open_factors.setdefault(self.site.attention, [])
        self.around = list(opened)
        opened.append(self.factors)
        try:
            with backend.hooked(hooks):
                yield
        finally:
            opened.pop()

    def _keep(self, part: str, tensor: Tensor) -> None:
        self.seen[part] = tensor

    def _write_value(self, heads: int, value: Tensor) -> Tensor:
        self._require_shape(len(value), heads, value.shape[1])
        factor = rearrange(self.factors, "batch head key -> batch key head 1").to(value)
        split = value.flatten(2).unflatten(-1, (heads, -1))
        written = (split * factor).reshape(value.shape)
        self.ran, self.changed = True, self.changed or bool((written != value).any())
        return written

    def _write_z(self, z: Tensor) -> Tensor:
        lost = rearrange(self._lost(), "batch head query d -> batch query head d")
        return (z.to(lost) - lost.reshape(z.shape)).to(z)

    def _write_output(self, returned: Any) -> Any:
        lost = self._lost()
        W_O = self.site.W_O(lost.shape[1]).to(lost)
        unwritten = einsum(lost, W_O, "batch head query d, head d m -> batch query m")
        output = _first(returned)
        written = (output.to(unwritten) - unwritten.reshape(output.shape)).to(output)
        return (written, *returned[1:]) if isinstance(returned, tuple) else written

    def _lost(self) -> Float[Tensor, "batch head query d_head"]:
        """What z loses: (1 - factor) alpha v of the keys marked, of what edits around leave."""
        parts = self.site.arranged(self.seen)
        pattern, value = parts["pattern"], parts["value"]
        heads = pattern.shape[1]
        self._require_shape(len(pattern), heads, pattern.shape[3])
        dtype = torch.promote_types(pattern.dtype, torch.float32)
        loss = (1 - self.factors).to(pattern.device, dtype)
        for factors in self.around:
            loss = loss * factors.to(loss)
        value = value.to(dtype).repeat_interleave(heads // value.shape[1], dim=1)
        # padded values may hold anything: those not marked must not come in
        value = torch.where(loss[..., None] == 0, 0.0, value * loss[..., None])
        lost = pattern.to(dtype) @ value
        if "gate" in parts:
            lost = lost * parts["gate"].to(dtype)
        self.ran, self.changed = True, self.changed or bool(lost.any())
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


def _first(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned
