"""Edits of the sink's value, one for each row of a batch, made in the very pass (SPEC 6).

Rows may be the same text under different edits: a sweep of factors, its controls and surgery on
the value then run as one batch. With v the value of one query head at one key, m the mean of the
head's non-sink values, both as the pass has them there, and G = W_O W_O^T, the part of v along the
mean's direction in the residual stream is v_par = (v^T G m / m^T G m) m, taken in d_head: its
projection is <v W_O, mu> mu, mu the unit vector along m W_O, and (v - v_par) W_O is orthogonal
to mu. A gate that queries put on what they read (Qwen3-Next) is left out of G.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cw_lens.edits import InterventionError
from cw_lens.errors import InputError, require_known
from cw_lens.layer import LayerAttention
from cw_lens.noise import mixed, uniform
from cw_lens.prompts import Prompts
from cw_lens.sinks import SINK_DETECTORS

KINDS = {
    "scale": "the value itself",
    "random": "a random vector whose projection is as long as the value's",
    "keep_parallel": "its part along the mean non-sink value alone",
    "keep_orthogonal": "its part orthogonal to the mean non-sink value alone",
    "flip_parallel": "the value with its part along the mean non-sink value reversed",
    "mean": "the mean non-sink value",
}
"""What each kind of edit puts in a value's place, before it is multiplied by the factor."""
SURGERY = ("keep_parallel", "keep_orthogonal", "flip_parallel", "mean")
"""The kinds that need the mean of the values that are neither sinks nor the first token's."""
FIRST, SINKS, CONTROL = "first", "sinks", "control"


@dataclass(frozen=True)
class ValueEdit:
    """What a row's value becomes: `factor` times what `kind` makes of it.

    Attributes:
        kind: a name out of `KINDS`.
        factor: any finite number; a value scaled by 1 is not touched.
        target: "first", the first real token; "sinks", all that the plan's detector marks in the
            very pass, layer by layer; or the number of a token, 0 being the first real one. In the
            conditions of a sweep also "control", a token drawn for each text.
        seed: of the random vector, or of the control token.

    Raises:
        InputError: a value that is none of these.
    """

    kind: str = "scale"
    factor: float = 1.0
    target: str | int = FIRST
    seed: int = 0

    def __post_init__(self) -> None:
        require_known("kind of edit", self.kind, KINDS)
        if not isinstance(self.factor, int | float) or not math.isfinite(self.factor):
            raise InputError(
                f"the factor is {self.factor!r}; it must be a finite number, such as 0 or 0.5."
            )
        numbered = isinstance(self.target, int) and self.target >= 0
        if not numbered and self.target not in (FIRST, SINKS, CONTROL):
            raise InputError(
                f"unknown target {self.target!r}; there are first, sinks, control and the number "
                "of a token, 0 being the first."
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 31:
            raise InputError(f"the seed is {self.seed!r}; it must be a whole number from 0.")

    @property
    def changes_nothing(self) -> bool:
        """Whether the run is to be the clean one."""
        return self.kind == "scale" and self.factor == 1


@dataclass(frozen=True, eq=False)
class EditPlan:
    """What to give to `edited_values`: prompts, and the edit of each.

    Attributes:
        prompts: what the model will be run on; None for any batch without padding.
        edits: one for each example, or one for all.
        layers: the layers in which values are edited; by default all that have attention.
        detector: which keys are sinks, a name out of `SINK_DETECTORS`.
        space: that of W_O, as in `capture`.

    Raises:
        InputError: no edits or a wrong number of them, an unknown detector, a control token not
            yet drawn, a random vector without the prompts that it depends on.
    """

    prompts: Prompts | None
    edits: Sequence[ValueEdit]
    layers: Sequence[int] | None = None
    detector: str = "cosine"
    space: str = "residual"

    def __post_init__(self) -> None:
        require_known("detector", self.detector, SINK_DETECTORS)
        edits = self.edits if isinstance(self.edits, Sequence) else [None]
        if not all(isinstance(edit, ValueEdit) for edit in edits):
            raise InputError("edits must be a list of ValueEdit, such as [ValueEdit('scale', 0)].")
        if not isinstance(self.prompts, Prompts | None):
            raise InputError(
                f"the prompts are a {type(self.prompts).__name__}. Make them with tokenize."
            )
        rows = None if self.prompts is None else len(self.prompts.ids)
        if len(self.edits) != 1 and len(self.edits) != rows:
            raise InputError(
                f"there are {len(self.edits)} edits for {'no' if rows is None else rows} prompts. "
                "Give one for each, or one for all."
            )
        if any(edit.target == CONTROL for edit in self.edits):
            raise InputError("the control token is not drawn yet; give its number as target.")
        if rows is None and any(edit.kind == "random" for edit in self.edits):
            raise InputError("a random vector is fixed by its prompt; give the plan its prompts.")

    @property
    def reads_layer(self) -> bool:
        """Whether an edit needs more of a layer than where the first token is."""
        return any(
            edit.kind != "scale" or (edit.target == SINKS and self.detector != FIRST)
            for edit in self.edits
        )


@dataclass(frozen=True, eq=False)
class EditedRows:
    """What the passes inside a context did, row by row.

    Attributes:
        changed: (head, key) values changed, over all layers and passes.
        lacking: row -> the first layer without a mean to edit along, where the row's value stayed
            as it was.
    """

    changed: Counter[int] = field(default_factory=Counter)
    lacking: dict[int, int] = field(default_factory=dict)

    def require_means(self) -> None:
        """Refuses rows in which a mean was lacking.

        Raises:
            InterventionError: naming layer and example.
        """
        for row, layer in self.lacking.items():
            raise InterventionError(
                f"layer {layer}, example {row}: no token beside the first and the sinks has a "
                "value, so there is no mean to edit along. Take longer texts, or a detector that "
                "marks fewer sinks."
            )


def parallel_part(
    value: Float[Tensor, "head key d_head"],
    mean: Float[Tensor, "head d_head"],
    gram: Float[Tensor, "head d_head other"],
) -> Float[Tensor, "head key d_head"]:
    """(v^T G m / m^T G m) m: what each value has along the mean's direction in the stream."""
    pulled = einsum(mean, gram, "head d, head d e -> head e")
    share = einsum(value, pulled, "head key d, head d -> head key")
    return (share / (pulled * mean).sum(dim=-1)[:, None])[..., None] * mean[:, None]


def random_as_long(
    value: Float[Tensor, "head key d_head"],
    gram: Float[Tensor, "head d_head other"],
    state: Int[Tensor, " key"],
) -> Float[Tensor, "head key d_head"]:
    """Gaussian directions of d_head, each with ||r W_O|| = ||v W_O||.

    Fixed by each key's state, head and component, whatever runs beside it.
    """
    heads, _, d_head = value.shape
    numbers = torch.arange(heads * d_head, device=value.device).reshape(heads, 1, d_head)
    drawn = uniform(mixed(mixed(state)[:, None] + numbers)).double()
    direction = torch.special.ndtri(drawn + 2.0**-25).to(value)  # never 0 or 1
    length = _projected_length(value, gram) / _projected_length(direction, gram)
    return direction * length[..., None]


def mean_value(
    layer: LayerAttention, others: Bool[Tensor, "batch head key"]
) -> tuple[Float[Tensor, "batch head d_head"], Bool[Tensor, " batch"]]:
    """Mean value over the real keys of `others`, and where a head has none, or one of length 0."""
    held = others & layer.mask[:, None]
    total = layer.value.masked_fill(~held[..., None], 0.0).sum(dim=2)
    mean = total / held.sum(dim=2).clamp_min(1)[..., None]
    length = _projected_length(mean[:, :, None], layer.gram)
    return mean, (length == 0).flatten(1).any(dim=1)


def _projected_length(
    value: Float[Tensor, "*batch head key d_head"], gram: Float[Tensor, "head d_head other"]
) -> Float[Tensor, "*batch head key"]:
    """||v W_O||; rounding below zero is zero."""
    return ((value @ gram) * value).sum(dim=-1).clamp_min(0.0).sqrt()
