"""What becomes of a layer's values while it is written into, and which: every `Change` there is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cw_lens.edits import Change
from cw_lens.errors import InputError
from cw_lens.layer import LayerAttention
from cw_lens.noise import mixed
from cw_lens.prompts import Prompts
from cw_lens.sinks import SINK_DETECTORS
from cw_lens.site_layers import site_layer
from cw_lens.sites import AttentionSite
from cw_lens.value_edits import (
    SINKS,
    SURGERY,
    EditedRows,
    EditPlan,
    ValueEdit,
    mean_value,
    parallel_part,
    random_as_long,
)


@dataclass(frozen=True, eq=False)
class OnlinePlan:
    """Values to mask that are chosen in the very pass that is masked, layer by layer.

    Attributes:
        prompts: what the model will be run on.
        layers: the numbers of the layers in which values are chosen.
        choose: layer as the pass comes to it, those before already masked -> bool
            [batch, head, key], True where a query head's value is masked.
        space: that in which layers are shown to `choose`, as in `capture`.
    """

    prompts: Prompts
    layers: Sequence[int]
    choose: Callable[[LayerAttention], Bool[Tensor, "batch head key"]]
    space: str = "residual"


@dataclass(frozen=True, eq=False)
class Scaling(Change):
    """Marked values times a factor."""

    mask: Bool[Tensor, "batch head key"]
    factor: float
    may_be_idle: bool = False

    def marked(self, site: AttentionSite, parts: Mapping[str, Tensor]) -> Tensor:
        """The mask, where it fits the run."""
        return _fitting(self.mask, site, parts["pattern"])

    def changed(self, value: Tensor) -> Tensor:
        """The values times the factor."""
        return value * self.factor


@dataclass(frozen=True, eq=False)
class Replacement(Change):
    """Other values in the place of those marked."""

    mask: Bool[Tensor, "batch head key"]
    values: Float[Tensor, "example head key d_head"]

    def marked(self, site: AttentionSite, parts: Mapping[str, Tensor]) -> Tensor:
        """The mask, where it and the new values fit the run."""
        mask = _fitting(self.mask, site, parts["pattern"])
        batch, d_head = len(parts["pattern"]), parts["value"].shape[-1]
        if len(self.values) not in (1, batch) or self.values.shape[-1] != d_head:
            raise InputError(
                f"layer {site.index}: the new values have shape {tuple(self.values.shape)}, the "
                f"run has batch {batch} and d_head {d_head}. Give values of the prompts run."
            )
        return mask

    def changed(self, value: Tensor) -> Tensor:
        """The new values."""
        return self.values.to(value).expand_as(value)


@dataclass(frozen=True, eq=False)
class OnlineMask(Change):
    """No value where the plan, shown the layer of this pass, chooses so."""

    plan: OnlinePlan
    online = True
    may_be_idle = True

    def marked(self, site: AttentionSite, parts: Mapping[str, Tensor]) -> Tensor:
        """What the plan chooses."""
        plan = self.plan
        mask = plan.choose(site_layer(site, parts, plan.prompts, plan.space))
        return _fitting(mask, site, parts["pattern"])

    def changed(self, value: Tensor) -> Tensor:
        """Zeros."""
        return torch.zeros_like(value)


@dataclass(frozen=True, eq=False)
class _Geometry:
    """What edits need of a layer in the pass that they write into."""

    noise: Int[Tensor, "batch key"]
    gram: Float[Tensor, "head d_head other"]
    mean: Float[Tensor, "batch head d_head"]


class RowEdits(Change):
    """One layer's values, each row's own edit made where its target is."""

    _geometry: _Geometry  # of the pass that is running, where an edit reads the layer

    def __init__(self, plan: EditPlan, done: EditedRows):
        self.plan, self.done = plan, done
        self.online = plan.reads_layer
        self._rows: list[ValueEdit] = []

    def marked(
        self, site: AttentionSite, parts: Mapping[str, Tensor]
    ) -> Bool[Tensor, "batch head key"]:
        """Where each row's target is in this pass; nowhere in rows that are to stay clean."""
        batch, heads, _, keys = parts["pattern"].shape
        prompts, device = self._prompts(site, batch, keys), parts["pattern"].device
        self._rows = [*self.plan.edits] * (batch if len(self.plan.edits) == 1 else 1)
        mask = prompts.mask.to(device)
        number = torch.arange(keys, device=device) - mask.int().argmax(dim=1)[:, None]
        is_first = ((number == 0) & mask)[:, None].expand(-1, heads, -1)
        sinks, lacking = is_first, [False] * batch
        if self.online:
            layer = site_layer(site, parts, prompts, self.plan.space)
            sinks = SINK_DETECTORS[self.plan.detector](layer)
            mean, missing = mean_value(layer, ~(sinks | is_first))
            noise = mixed(mixed(layer.prompt_digest)[:, None] + number)
            self._geometry = _Geometry(mixed(noise + site.index), layer.gram, mean)
            lacking = missing.tolist()
        marks = torch.zeros_like(is_first)
        for row, edit in enumerate(self._rows):
            if edit.changes_nothing:
                continue
            if edit.kind in SURGERY and lacking[row]:
                self.done.lacking.setdefault(row, site.index)
            elif isinstance(edit.target, int):
                marks[row] = _token(edit.target, row, number, mask)
            else:
                marks[row] = (sinks if edit.target == SINKS else is_first)[row]
        self.done.changed.update(dict(enumerate(marks.sum(dim=(1, 2)).tolist())))
        return marks

    def changed(
        self, value: Float[Tensor, "batch head key d_head"]
    ) -> Float[Tensor, "batch head key d_head"]:
        """Each row's values as its edit would make them at every key."""
        new = value.clone()
        for row, edit in enumerate(self._rows):
            if not edit.changes_nothing:
                new[row] = edit.factor * self._made(edit, row, value[row])
        return new

    def _made(
        self, edit: ValueEdit, row: int, value: Float[Tensor, "head key d_head"]
    ) -> Float[Tensor, "head key d_head"]:
        """What the kind makes of each value of a row."""
        if edit.kind == "scale":
            return value
        gram, mean = self._geometry.gram, self._geometry.mean[row]
        if edit.kind == "random":
            return random_as_long(value, gram, self._geometry.noise[row] + edit.seed)
        if edit.kind == "mean":
            return mean[:, None].expand_as(value)
        parallel = parallel_part(value, mean, gram)
        if edit.kind == "keep_parallel":
            return parallel
        return value - (parallel if edit.kind == "keep_orthogonal" else 2 * parallel)

    def _prompts(self, site: AttentionSite, batch: int, keys: int) -> Prompts:
        """The plan's prompts, where they fit the run; real tokens throughout where it has none."""
        prompts = self.plan.prompts
        if prompts is None:
            ids = torch.zeros(batch, keys, dtype=torch.long)
            return Prompts(ids, torch.ones_like(ids, dtype=torch.bool), tokens=(), bos=())
        if tuple(prompts.ids.shape) != (batch, keys):
            raise InputError(
                f"layer {site.index}: the plan is for prompts of shape "
                f"{tuple(prompts.ids.shape)}, the run has {(batch, keys)} (batch, position). Run "
                "the prompts that the plan was made for."
            )
        return prompts


def _fitting(mask: Tensor, site: AttentionSite, pattern: Tensor) -> Tensor:
    """The mask, where it fits the pattern of the run."""
    batch, heads, _, keys = pattern.shape
    if mask.shape[0] not in (1, batch) or tuple(mask.shape[1:]) != (heads, keys):
        raise InputError(
            f"layer {site.index}: the mask has shape {tuple(mask.shape)}, the run has "
            f"{(batch, heads, keys)} (batch, head, key). Mark [batch, head, key] of the "
            "prompts that are run, query heads each on their own."
        )
    return mask


def _token(
    target: int, row: int, number: Int[Tensor, "batch key"], mask: Bool[Tensor, "batch key"]
) -> Bool[Tensor, " key"]:
    """Where a row's token of this number is."""
    found = (number[row] == target) & mask[row]
    if not found.any():
        raise InputError(
            f"example {row} has {int(mask[row].sum())} tokens, counted from 0; there is no "
            f"token {target}."
        )
    return found
