"""One layer's values, changed while the model runs: where the change goes in, and what it takes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cw_lens import backend
from cw_lens.errors import CWLensError
from cw_lens.sites import AttentionSite, UnsupportedModelError, attention_sites

ROUTES = {
    "z": "at hook_z",
    "output": "at what the attention module returns",
    "value": "at the values",
}
"""Where a write goes in, in order of preference; all change the output by the same amount."""

# the edits open at a site, in the order in which they write: each counts what those before leave
_open_edits: "WeakKeyDictionary[nn.Module, list[Edit]]" = WeakKeyDictionary()
# a short pass that looks for routes runs clean, also inside an open context
_looking: ContextVar[bool] = ContextVar("looking", default=False)


class InterventionError(CWLensError, RuntimeError):
    """An intervention that changed nothing."""


class Change(ABC):
    """Which values of a layer change, and into what."""

    online = False
    """Whether the marks are found in the very pass."""
    may_be_idle = False
    """Whether marked values may lack any weight, as those that a ranking chose may."""

    @abstractmethod
    def marked(self, site: AttentionSite, parts: Mapping[str, Tensor]) -> Bool[Tensor, "..."]:
        """[batch, head, key] of the pass that `parts` are of, or of one example for all."""

    @abstractmethod
    def changed(
        self, value: Float[Tensor, "batch head key d_head"]
    ) -> Float[Tensor, "batch head key d_head"]:
        """What values become where they are marked."""


class Edit:
    """A change at one site, from the hooks that see its parts to the one that writes."""

    def __init__(self, site: AttentionSite, change: Change):
        self.site = site
        self.change = change
        self.seen: dict[str, Tensor] = {}
        self.route = ""
        self.marks: Tensor | None = None  # of the pass that is running
        self.ran = False
        self.idle: Tensor | None = None  # by example: marked, and never changed

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
            parts = [part for part in ("residual", "value", "pattern", "gate") if part in points]
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
        self.marks = None
        self.seen[part] = tensor

    def _write_value(self, heads: int, value: Tensor) -> Tensor:
        split = rearrange(
            value.flatten(2), "batch key (head d) -> batch head key d", head=heads
        ).contiguous()
        # the pattern, which tells the shape of a pass, comes later: the values stand in
        self.marks = self.change.marked(self.site, {"pattern": split[..., :1].mT, "value": split})
        written = torch.where(self._marks(split), self.change.changed(split), split)
        return rearrange(written, "batch head key d -> batch key (head d)").reshape(value.shape)

    def _note_weight(self, pattern: Tensor) -> None:
        """Whether any value written was read; the pattern shows after the values."""
        self._note(pattern.masked_fill(~self._marks(pattern).mT, 0.0))

    def _write_z(self, z: Tensor) -> Tensor:
        lost = self._lost_now()
        lost = rearrange(lost, "batch head query d -> batch query head d")
        return (z.to(lost) - lost.reshape(z.shape)).to(z)

    def _write_output(self, returned: Any) -> Any:
        lost = self._lost_now()
        written = _without(_first(returned), self.site, lost)
        return (written, *returned[1:]) if isinstance(returned, tuple) else written

    def _lost_now(self) -> Float[Tensor, "batch head query d_head"]:
        """What z loses in the pass that the edit's own hooks have seen, which they then forget."""
        lost = self.lost(self.site.arranged(self.seen))
        self.seen.clear()  # else every layer's pattern would stay until the next pass
        self._note(lost)
        return lost

    def lost(self, parts: Mapping[str, Tensor]) -> Float[Tensor, "batch head query d_head"]:
        """What z loses: alpha times what the change takes from the values marked.

        Args:
            parts: of the layer, arranged.
        """
        opened = _open_edits[self.site.attention]
        before = _through(opened[: opened.index(self)], parts)
        if self.marks is None:
            self.marks = self.change.marked(self.site, {**parts, "value": before})
        marks = self._marks(before)
        # padded values may hold anything: those not marked must not come in
        taken = torch.where(marks, before - self.change.changed(before), 0.0)
        lost = parts["pattern"].to(taken) @ taken
        if "gate" in parts:
            lost = lost * parts["gate"].to(lost)
        return lost

    def written(
        self, value: Float[Tensor, "batch head key d_head"]
    ) -> Float[Tensor, "batch head key d_head"]:
        """The values as this edit, which has seen its pass, leaves them."""
        return torch.where(self._marks(value), self.change.changed(value), value)

    def _marks(self, like: Tensor) -> Bool[Tensor, "batch_or_1 head key 1"]:
        if self.marks is None:
            raise InterventionError(f"layer {self.site.index}: no pass has come to this edit.")
        return self.marks.to(like.device)[..., None]

    def _note(self, change: Tensor) -> None:
        self.ran = True
        if self.marks is None or self.change.may_be_idle:
            return
        changed = (change != 0).flatten(1).any(dim=1).cpu()
        idle = self.marks.flatten(1).any(dim=1).cpu().expand(len(changed)) & ~changed
        if self.idle is not None and self.idle.shape == idle.shape:
            idle = idle & self.idle
        self.idle = idle

    def require_effect(self) -> None:
        """Refuses an edit that, now that it closes, left an example as it was.

        Raises:
            InterventionError: naming layer and example.
        """
        if not self.ran:
            why, what = "the model was not run inside", "Run the model inside the context."
        elif self.idle is not None and self.idle.any():
            example = int(self.idle.nonzero()[0])
            why = f"no value marked in example {example} has any weight"
            what = "Mark real keys that queries attend to."
        else:
            return
        raise InterventionError(
            f"layer {self.site.index}: changing values changed nothing, because {why}. {what}"
        )


def write_routes(model: Any, layers: list[int]) -> dict[int, str]:
    """For each layer, where a write to its values reaches its output; found in a short pass.

    "z" where the pattern is known before z, "output" where the attention module returns the
    output matrix's output, "value" where each head has its own values.

    Raises:
        UnsupportedModelError: none of these; the message names the layer.
    """
    return {layer: route for layer, (route, _heads) in found_routes(model, layers).items()}


def found_routes(model: Any, layers: list[int]) -> dict[int, tuple[str, int]]:
    """Route and number of query heads of each layer; raises as `write_routes`."""
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


def as_written(site: AttentionSite, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was read of a layer, as the writes open at it leave it: values changed, z to match.

    The attention weights stay what they were; a value that is masked gives nothing.
    """
    edits = _open_edits.get(site.attention, [])
    edits = [edit for edit in edits if edit.route != "value"]  # those change the values themselves
    if not edits:
        return parts
    dtype, z, output = parts["z"].dtype, parts["z"], parts.get("output")
    for edit in edits:
        if edit.route == "output":  # written behind the points that were read
            lost = edit.lost(parts)
            edit._note(lost)  # a reading pass may end before the write
            z = (z.to(lost) - lost).to(dtype)
            if output is not None:
                output = _without(output, site, lost)
    written = {**parts, "value": _through(edits, parts), "z": z}
    return written if output is None else {**written, "output": output}


def _through(
    edits: list[Edit], parts: Mapping[str, Tensor]
) -> Float[Tensor, "batch head key d_head"]:
    """Each query head's values as these edits leave them, in float32 at least."""
    pattern, value = parts["pattern"], parts["value"]
    value = value.to(torch.promote_types(pattern.dtype, torch.float32))
    value = value.repeat_interleave(pattern.shape[1] // value.shape[1], dim=1)
    for edit in edits:
        if edit.route != "value":
            value = edit.written(value)
    return value


def is_looking() -> bool:
    """Whether the pass that runs is a short one, that looks for routes."""
    return _looking.get()


def _unless_looking(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda seen: None if _looking.get() else function(seen)


def _without(
    output: Tensor, site: AttentionSite, lost: Float[Tensor, "batch head query d_head"]
) -> Tensor:
    """The layer's output, less what a part of z wrote into it."""
    W_O = site.W_O(lost.shape[1]).to(lost)
    unwritten = einsum(lost, W_O, "batch head query d, head d m -> batch query m")
    return (output.to(unwritten) - unwritten.reshape(output.shape)).to(output)


def _first(returned: Any) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned
