"""Writing into attention while a model runs: mask, scale or replace single values (SPEC 6).

Context managers: the hooks are ours alone and gone afterwards, also after an exception. A write
names query heads, and reaches those alone also where heads share values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cw_lens import backend
from cw_lens.changes import OnlineMask, OnlinePlan, Replacement, RowEdits, Scaling
from cw_lens.edits import Change, Edit, found_routes, is_looking
from cw_lens.errors import InputError, require_known, spans
from cw_lens.prompts import Prompts
from cw_lens.runs import attention_sites as readable_sites
from cw_lens.runs import layer_indices, require_prompts
from cw_lens.sinks import SINK_DETECTORS
from cw_lens.sites import UnsupportedModelError, attention_layers, attention_sites
from cw_lens.value_edits import FIRST, SINKS, EditedRows, EditPlan, ValueEdit

Where = Mapping[int, Bool[Tensor, "batch head key"]]


class RankedMasks(dict[int, Bool[Tensor, "batch head key"]]):
    """Masks by layer that a ranking chose, or that try values out: some may lack any weight."""


@contextmanager
def masked_values(model: Any, where: Where | OnlinePlan) -> Iterator[None]:
    """Inside, the projected values marked are zero: alpha v is dropped from z, for every query.

    Attention is not renormalised. Routes and nesting: as `scaled_values`.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        where: a plan of `removal_plan`, or masks as `scaled_values` takes them.

    Raises:
        InputError: as `scaled_values`; other token ids than an online plan's prompts' are run.
        UnsupportedModelError: as `scaled_values`; an online plan where the pattern shows only
            after it was used.
        InterventionError: as `scaled_values`; what a plan chooses may lack any weight, which is
            no error.
    """
    if isinstance(where, OnlinePlan):
        changes: dict[int, Change] = {i: OnlineMask(where) for i in where.layers}
        remedy = 'they cannot be ranked in the same pass. Use ranking="clean" (--ranking clean).'
        _checked_layers(model, changes)
        guard: Any = _only_these(model, where.prompts)
    else:
        remedy = ""
        idle = isinstance(where, RankedMasks)
        changes = {i: Scaling(mask, 0.0, idle) for i, mask in _marked(model, where).items()}
        guard = nullcontext()
    with guard, _changed_values(model, changes, remedy):
        yield


@contextmanager
def _only_these(model: Any, prompts: Prompts) -> Iterator[None]:
    """Inside, the model refuses token ids that are not these."""

    def check(_model: Any, given: tuple[Any, ...]) -> None:
        ids = given[0] if given else None
        if not isinstance(ids, Tensor) or ids.is_floating_point() or is_looking():
            return  # text, images: their pattern must fit the plan's prompts all the same
        if not torch.equal(ids, prompts.ids.to(ids.device)):
            raise InputError(
                f"the plan is for prompts of shape {tuple(prompts.ids.shape)} (batch, position) "
                f"and the model was given other token ids, of shape {tuple(ids.shape)}. Run the "
                "prompts that the plan was made for."
            )

    handle = model.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def scaled_values(
    model: Any,
    factor: float,
    where: Where | None = None,
    *,
    positions: str | None = None,
    layers: Sequence[int] | None = None,
    prompts: Prompts | None = None,
) -> Iterator[None]:
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
        positions: instead of masks: "first", the first real token; "sink", all that the `cosine`
            detector marks in the very pass, layer by layer, those before already written; or the
            name of another of `SINK_DETECTORS`. In every query head.
        layers: with positions, the layers written into; by default all that have attention.
        prompts: with positions, what will be run. Without it every position counts as real, so a
            padded batch needs it.

    Raises:
        InputError: a factor that is not finite, a layer without attention, a mask that is no bool
            tensor or of another shape than the pattern; not one of where and positions, unknown
            positions, other token ids than the prompts'.
        UnsupportedModelError: no write reaches the output of a layer, or only before its pattern
            shows, so that sinks cannot be found in the same pass.
        InterventionError: when it ends without having changed anything in a layer and an example
            in which values are marked.
    """
    if not isinstance(factor, int | float) or not math.isfinite(factor):
        raise InputError(f"the factor is {factor!r}; it must be a finite number, such as 0 or 0.5.")
    if (where is None) == (positions is None):
        raise InputError('give where, masks by layer, or positions, such as "first" or "sink".')
    if where is None:
        with edited_rows(model, _plan_of_positions(positions, factor, layers, prompts)):
            yield
        return
    if layers is not None or prompts is not None:
        raise InputError("layers and prompts go with positions; where names its layers itself.")
    masks = _marked(model, where)
    with _changed_values(
        model, {} if factor == 1 else {i: Scaling(m, factor) for i, m in masks.items()}
    ):
        yield


def _plan_of_positions(
    positions: str | None, factor: float, layers: Sequence[int] | None, prompts: Prompts | None
) -> EditPlan:
    """The same scaling for every example, at these positions."""
    detectors = {"sink": "cosine", **{name: name for name in SINK_DETECTORS}}
    require_known("positions", positions, detectors)
    edit = ValueEdit("scale", factor, FIRST if positions == FIRST else SINKS)
    return EditPlan(prompts, [edit], layers, detectors[str(positions)])


@contextmanager
def edited_values(model: Any, plan: EditPlan, *, allow_folded: bool = False) -> Iterator[None]:
    """Inside, each example has its own edit: a value becomes what the plan makes of it.

    For instance its part along the mean of the other values, or a random vector of its length:
    see `ValueEdit`. Attention stays as it is, and an edit sees the values of the very pass, those
    of the layers before already edited. Contexts nest. An example scaled by 1 is the clean run
    bit for bit, also beside others.

    Args:
        model: any model of TransformerLens, or what `load_model` and `wrap_model` return.
        plan: an `EditPlan`; the model must then be run on its prompts.
        allow_folded: as `capture`.

    Raises:
        InputError: a layer that the model does not have, an unknown space, folded value biases,
            other token ids than the plan's, a token that an example does not have.
        UnsupportedModelError: as `scaled_values`.
        InterventionError: as `scaled_values`, or where a mean value is asked for and no token is
            neither a sink nor the first.
    """
    if not isinstance(plan, EditPlan):
        raise InputError(f"the plan is a {type(plan).__name__}; it must be an EditPlan.")
    layers = layer_indices(model, plan.layers)
    readable_sites(model, layers, space=plan.space, allow_folded=allow_folded)
    with edited_rows(model, plan) as done:
        yield
    done.require_means()


@contextmanager
def edited_rows(model: Any, plan: EditPlan) -> Iterator[EditedRows]:
    """As `edited_values`, for studies: yields what is done to each row.

    A row without a mean value to edit along is noted there, keeps its value, and raises nothing.
    """
    done = EditedRows()
    layers = layer_indices(model, plan.layers)
    guard: Any = nullcontext()
    if plan.prompts is not None:
        require_prompts(model, plan.prompts)
        guard = _only_these(model, plan.prompts)
    remedy = 'no sink can be found in the same pass. Use positions="first", or masks as where.'
    with guard, _changed_values(model, {i: RowEdits(plan, done) for i in layers}, remedy):
        yield done


@contextmanager
def replaced_values(
    model: Any, where: Where, values: Mapping[int, Float[Tensor, "..."]]
) -> Iterator[None]:
    """Inside, the values marked are others: alpha v becomes alpha times the value given.

    Values are those of `LayerAttention.value`, before the output matrix, one for each query head
    also where heads share values. Attention stays as it is. Contexts nest: the last one stands.

    Args:
        model, where: as `scaled_values`.
        values: layer -> [batch, head, key, d_head], read only where marked; a batch of 1 serves
            every example.

    Raises:
        InputError: values missing for a layer, of a wrong shape, or not finite where marked; and
            as `scaled_values`.
        UnsupportedModelError, InterventionError: as `scaled_values`.
    """
    masks = _marked(model, where)
    total = backend.n_layers(model)
    if not isinstance(values, Mapping) or not all(isinstance(v, Tensor) for v in values.values()):
        raise InputError(
            "values must map layers to tensors, such as {3: new} with a tensor of [batch, head, "
            "key, d_head]."
        )
    given = {layer % total: value for layer, value in values.items()}
    changes = {}
    for layer, mask in masks.items():
        if layer not in given:
            raise InputError(f"layer {layer} has marked values and no values to put there.")
        new = given[layer]
        if tuple(new.shape[1:3]) != tuple(mask.shape[1:]) or new.ndim != 4:
            raise InputError(
                f"layer {layer}: the new values have shape {tuple(new.shape)}, the mask "
                f"{tuple(mask.shape)}. Give [batch, head, key, d_head] for each query head."
            )
        if 1 not in (len(new), len(mask)) and len(new) != len(mask):
            raise InputError(
                f"layer {layer}: there are new values for {len(new)} examples and a mask of "
                f"{len(mask)}. Give as many, or one for all."
            )
        if (mask.to(new.device) & ~new.isfinite().all(dim=-1)).any():
            raise InputError(f"layer {layer}: the new values hold NaN or infinity where marked.")
        changes[layer] = Replacement(mask, new)
    with _changed_values(model, changes):
        yield


@contextmanager
def _changed_values(model: Any, changes: Mapping[int, Change], remedy: str = "") -> Iterator[None]:
    if not changes:
        yield
        return
    routes = found_routes(model, list(changes))
    for layer, change in changes.items():
        if change.online and routes[layer][0] == "value":
            raise UnsupportedModelError(
                f"layer {layer}: values can be written only before the pattern shows, so {remedy}"
            )
    edits = [Edit(site, changes[site.index]) for site in attention_sites(model, list(changes))]
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit.active(*routes[edit.site.index]))
        yield
    for edit in edits:
        edit.require_effect()


def _marked(model: Any, where: Where) -> dict[int, Tensor]:
    """The masks that mark anything, by layer from 0, once they are what they must be."""
    if not isinstance(where, Mapping):
        raise InputError(
            f"where is a {type(where).__name__}; it must map layers to masks, such as "
            "{3: mask} with a bool mask of [batch, head, key]."
        )
    numbers = _checked_layers(model, where)
    for layer, mask in where.items():
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
    return {numbers[layer]: mask for layer, mask in where.items() if mask.any()}


def _checked_layers(model: Any, layers: Mapping[int, Any]) -> dict[int, int]:
    """Each layer's number from 0, where it has attention."""
    having, total = attention_layers(model), backend.n_layers(model)
    for layer in layers:
        whole = isinstance(layer, int) and not isinstance(layer, bool)
        if not whole or layer % total not in having or not -total <= layer < total:
            raise InputError(
                f"layer {layer} has no attention to write into; those that have are "
                f"{spans(having)}."
            )
    return {layer: layer % total for layer in layers}
