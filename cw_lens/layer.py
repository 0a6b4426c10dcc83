"""One attention layer of one forward pass, frozen: what every metric and study reads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.noise import prompt_digest

LOW_OUTPUT = 1e-3
"""Outputs shorter than this share of the layer's median output count as low."""
_TINY = 1e-18  # squares stay above float32's smallest normal number
_GATED_ELEMENTS = 1 << 22  # floats of gated values at a time: 16 MB


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """What one attention layer read, weighed and wrote, in float32 or better.

    Every quantity is row-wise in the query: a layer may hold a block of queries and all the keys
    that they see (`queries`), and metrics act on it unchanged. Build one with `layer_attention`.

    Attributes:
        index: the layer's number in the model, from 0.
        pattern: attention weights after the softmax, as the model used them; 0 where the query or
            the key is padding (alpha in the paper).
        value: values as the model used them, value bias included, grouped values repeated for
            each query head (v).
        W_O: output matrix, split by head.
        b_O: output bias, which is nobody's contribution; None if the model has none.
        z: sum over keys of pattern * value, per head, times `gate` where there is one.
        output: sum over heads of z W_O, without `b_O`, before the residual is added (o).
        residual: the layer's input, the residual stream before the block (x), at every key.
        prompt_digest: a number for each example's tokens, which seeds the random control.
        mask: True at real tokens, False at padding.
        output_floor: length under which `output` counts as low, per example.
        head_output_floor: the same for the output of one head.
        causal: whether a query sees only itself and earlier keys.
        query_start: the position of the first query held.
        gate: what multiplies z, component by component, before the output matrix; part of the
            value that a query sees (Qwen3-Next). None where there is no such gate.
        stream_gain: ||what is added to the residual stream|| / ||output||, query by query: the
            scalar of a norm after the output matrix, a residual multiplier. None where it is 1.
        space: "residual" if a norm after the output matrix is folded into `W_O` and `b_O`,
            "attention" if it is left out (SPEC 1); the same where there is no such norm.
        z_gradient: gradient of the summed next-token loss with respect to `z`, where captured.
    """

    index: int
    pattern: Float[Tensor, "batch head query key"]
    value: Float[Tensor, "batch head key d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_O: Float[Tensor, " d_model"] | None
    z: Float[Tensor, "batch head query d_head"]
    output: Float[Tensor, "batch query d_model"]
    residual: Float[Tensor, "batch key d_model"]
    prompt_digest: Int[Tensor, " batch"]
    mask: Bool[Tensor, "batch key"]
    output_floor: Float[Tensor, " batch"]
    head_output_floor: Float[Tensor, " batch"]
    causal: bool = True
    query_start: int = 0
    gate: Float[Tensor, "batch head query d_head"] | None = None
    stream_gain: Float[Tensor, "batch query"] | None = None
    space: str = "residual"
    z_gradient: Float[Tensor, "batch head query d_head"] | None = None

    @property
    def query_mask(self) -> Bool[Tensor, "batch query"]:
        """True at the real queries held."""
        return self.mask[:, self.query_start : self.query_start + self.pattern.shape[2]]

    @property
    def first(self) -> Int[Tensor, " batch"]:
        """Position of each example's first real token."""
        return self.mask.int().argmax(dim=1)

    @cached_property
    def edge_mask(self) -> Bool[Tensor, "batch query key"]:
        """True where a real query may attend to a real key."""
        edges = self.query_mask[:, :, None] & self.mask[:, None, :]
        return edges.tril(diagonal=self.query_start) if self.causal else edges

    @cached_property
    def gram(self) -> Float[Tensor, "head d_head other"]:
        """G = W_O W_O^T of each head: inner products of projected values, taken in d_head."""
        return einsum(self.W_O, self.W_O, "head d m, head e m -> head d e")

    @cached_property
    def output_norm(self) -> Float[Tensor, "batch query"]:
        """Length of each output, never below `output_floor`: what shares are divided by."""
        floor = self.output_floor.clamp_min(_TINY)[:, None]
        return self.output.norm(dim=-1).maximum(floor)

    @cached_property
    def head_output_norm(self) -> Float[Tensor, "batch head query"]:
        """Length of each head's output, never below `head_output_floor`."""
        floor = self.head_output_floor.clamp_min(_TINY)[:, None, None]
        return _projected_norm(self.z, self.gram).maximum(floor)

    @cached_property
    def projected_value_norm(self) -> Float[Tensor, "batch head key"]:
        """Length of each projected value, ||v W_O||, before any gate."""
        return _projected_norm(self.value, self.gram)

    @cached_property
    def edge_value_norm(self) -> Float[Tensor, "batch head query_or_1 key"]:
        """Length of each projected value as each query sees it, through its gate if it has one.

        Without a gate all queries see the same: the query axis has length 1.
        """
        if self.gate is None:
            return self.projected_value_norm[:, :, None]
        # ||(g * v) W_O||^2 = sum over d, e of g_d g_e G_de v_d v_e, in blocks of queries
        norms = torch.empty_like(self.pattern)
        keys, d_head = self.value.shape[2:]
        size = max(1, _GATED_ELEMENTS // (self.value[..., 0].numel() * d_head))
        for start in range(0, self.pattern.shape[2], size):
            gated = self.gate[:, :, start : start + size, None] * self.value[:, :, None]
            flat = gated.flatten(2, 3)
            norms[:, :, start : start + size] = _projected_norm(flat, self.gram).unflatten(
                2, (-1, keys)
            )
        return norms

    def aligned(
        self, direction: Float[Tensor, "batch head query d_head"]
    ) -> Float[Tensor, "batch head query key"]:
        """Inner product of a query's vector in d_head with each value that it sees."""
        if self.gate is not None:
            direction = direction * self.gate
        return direction @ self.value.mT

    def queries(self, start: int, stop: int) -> "LayerAttention":
        """The same layer for the queries from start to stop alone, with the keys that they see.

        Views, not copies; what the whole layer has already derived is handed down. Positions are
        those of the whole layer's prompt.

        Raises:
            InputError: if this layer does not start at query 0, or the range is empty or outside.
        """
        total = self.pattern.shape[2]
        if self.query_start or not 0 <= start < stop <= total:
            raise InputError(
                f"layer {self.index} holds queries {self.query_start} to "
                f"{self.query_start + total}; cannot take {start} to {stop} of it. "
                "Take query blocks from the whole layer, inside its range."
            )
        keys = stop if self.causal else self.mask.shape[1]
        block = replace(
            self,
            pattern=self.pattern[:, :, start:stop, :keys],
            value=self.value[:, :, :keys],
            z=self.z[:, :, start:stop],
            output=self.output[:, start:stop],
            residual=self.residual[:, :keys],
            mask=self.mask[:, :keys],
            query_start=start,
            gate=None if self.gate is None else self.gate[:, :, start:stop],
            stream_gain=None if self.stream_gain is None else self.stream_gain[:, start:stop],
            z_gradient=None if self.z_gradient is None else self.z_gradient[:, :, start:stop],
        )
        block.__dict__["gram"] = self.gram
        block.__dict__["projected_value_norm"] = self.projected_value_norm[:, :, :keys]
        return block

    def examples(self, rows: slice) -> "LayerAttention":
        """The same layer for these examples of the batch alone: views, not copies."""
        if len(range(*rows.indices(len(self.mask)))) == len(self.mask):
            return self
        by_example = ("pattern", "value", "z", "output", "residual", "prompt_digest", "mask")
        by_example += ("output_floor", "head_output_floor")
        optional = ("gate", "stream_gain", "z_gradient")
        held = (*by_example, *(name for name in optional if getattr(self, name) is not None))
        part = replace(self, **{name: getattr(self, name)[rows] for name in held})
        part.__dict__["gram"] = self.gram
        return part

    def text(self, row: int) -> "LayerAttention":
        """The same layer for one example without its padding: views, not copies.

        Raises:
            InputError: a block of the queries, or padding in between real tokens.
        """
        part = self.examples(slice(row, row + 1))
        real = part.mask[0].nonzero().flatten()
        start, stop = int(real[0]), int(real[-1]) + 1
        if self.query_start or self.pattern.shape[2] != self.mask.shape[1]:
            raise InputError(
                f"layer {self.index} holds a block of the queries; take a text of the whole layer."
            )
        if len(real) != stop - start:
            raise InputError(
                f"example {row} has padding between its tokens; a text is one run of real tokens."
            )
        if part is self and len(real) == self.mask.shape[1]:
            return self
        within = slice(start, stop)
        changed = {
            "pattern": part.pattern[:, :, within, within],
            "value": part.value[:, :, within],
            "z": part.z[:, :, within],
            "output": part.output[:, within],
            "residual": part.residual[:, within],
            "mask": part.mask[:, within],
            "gate": None if part.gate is None else part.gate[:, :, within],
            "stream_gain": None if part.stream_gain is None else part.stream_gain[:, within],
            "z_gradient": None if part.z_gradient is None else part.z_gradient[:, :, within],
        }
        cut = replace(part, **changed)
        cut.__dict__["gram"] = self.gram
        return cut

    def query_blocks(self, size: int) -> Iterator["LayerAttention"]:
        """The layer cut into blocks of at most `size` queries, in order."""
        total = self.pattern.shape[2]
        for start in range(0, total, size):
            yield self.queries(start, min(start + size, total))


def layer_attention(
    index: int,
    pattern: Float[Tensor, "batch head query key"],
    value: Float[Tensor, "batch group key d_head"],
    *,
    W_O: Float[Tensor, "head d_head d_model"],
    b_O: Float[Tensor, " d_model"] | None,
    residual: Float[Tensor, "batch key d_model"],
    ids: Int[Tensor, "batch key"],
    mask: Bool[Tensor, "batch key"],
    causal: bool = True,
    gate: Float[Tensor, "batch head query d_head"] | None = None,
) -> LayerAttention:
    """A whole layer from what the model used: `z` and `output` are rebuilt from the parts.

    Low-precision input is raised to float32 first. Grouped values (fewer groups than heads) are
    repeated; rows and columns of padding are set to 0.

    Args:
        index: the layer's number.
        pattern: attention weights, query and key running over the same positions.
        value: values, one group for every query head or for several.
        W_O, b_O: output matrix split by head, and output bias.
        residual: the layer's input.
        ids, mask: token ids, and True at real tokens.
        causal: whether queries see only earlier keys.
        gate: factor of z, component by component.

    Raises:
        InputError: if the heads are not a multiple of the value groups.
    """
    dtype = torch.promote_types(pattern.dtype, torch.float32)
    heads, groups = pattern.shape[1], value.shape[1]
    if heads % groups:
        raise InputError(
            f"layer {index} has {heads} query heads and {groups} value groups; grouped values "
            "need a whole number of heads a group. Check the pattern's and the value's axes."
        )
    pattern, value, residual, W_O = (x.to(dtype) for x in (pattern, value, residual, W_O))
    if not mask.all():
        real = mask[:, None, :, None] & mask[:, None, None, :]
        # padded activations may hold anything, NaN included: replaced, not multiplied
        pattern = pattern.masked_fill(~real, 0.0)
        value = value.masked_fill(~mask[:, None, :, None], 0.0)
        residual = residual.masked_fill(~mask[:, :, None], 0.0)
    value = value.repeat_interleave(heads // groups, dim=1)
    z = pattern @ value
    if gate is not None:
        gate = gate.to(dtype).masked_fill(~mask[:, None, :, None], 0.0)
        z = z * gate
    output = einsum(z, W_O, "batch head query d, head d m -> batch query m")
    gram = einsum(W_O, W_O, "head d m, head e m -> head d e")
    layer = LayerAttention(
        index=index,
        pattern=pattern,
        value=value,
        W_O=W_O,
        b_O=None if b_O is None else b_O.to(dtype),
        z=z,
        output=output,
        residual=residual,
        prompt_digest=prompt_digest(ids, mask),
        mask=mask,
        output_floor=_floor(output.norm(dim=-1), mask),
        head_output_floor=_floor(_projected_norm(z, gram), mask[:, None].expand(z.shape[:-1])),
        causal=causal,
        gate=gate,
    )
    layer.__dict__["gram"] = gram
    return layer


def _projected_norm(
    vector: Float[Tensor, "batch head position d_head"],
    gram: Float[Tensor, "head d_head other"],
) -> Float[Tensor, "batch head position"]:
    """Length after the output matrix, sqrt(v^T G v); rounding below zero is zero."""
    squared = ((vector @ gram) * vector).sum(dim=-1)
    return squared.clamp_min(0.0).sqrt()


def _floor(
    norm: Float[Tensor, "batch *axes"], real: Bool[Tensor, "batch *axes"]
) -> Float[Tensor, " batch"]:
    """LOW_OUTPUT times the median over real positions, example by example (SPEC 2)."""
    median = norm.masked_fill(~real, torch.nan).flatten(1).nanmedian(dim=1).values
    return LOW_OUTPUT * median
