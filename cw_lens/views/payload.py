"""What the explain page draws from, as JSON: numbers packed small, nothing that can be derived.

A page holds attention, signed contribution, intra-head contribution and cosine of each edge, and
the two vectors of lengths; its script derives value-weighted attention, |c| and relative norm.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cw_lens.certificates import Certificate
from cw_lens.errors import InputError
from cw_lens.geometry import decompose, inter_head_contributions, intra_head_contributions
from cw_lens.layer import LayerAttention
from cw_lens.metrics import METRICS, Metric
from cw_lens.studies.explain import Explanation
from cw_lens.views.words import facts, verdict

STEPS = 32_767
"""Packed numbers are whole multiples of (largest magnitude / STEPS)."""

DERIVED = (
    "attention",
    "value_weighted",
    "value_weighted_output_normalized",
    "contribution",
    "signed_contribution",
    "intra_head_contribution",
    "relative_norm",
    "cosine",
)
"""What a page shows of every edge that it holds, in the order of its switch; the last two are the
second and the third factor of a contribution, and attention is the first."""

MATRICES = ("attention", "signed_contribution", "intra_head_contribution", "cosine")
"""The edge matrices that a page holds for each layer; one whose values pass a gate that differs
from query to query has its relative norm too."""


def prompt_payload(explanation: Explanation, *, layer_scores: bool) -> dict[str, Any]:
    """Everything of one text but the edges of its layers.

    Args:
        layer_scores: whether to hold token scores of every layer, or their mean alone.
    """
    prompts, scores, heads = explanation.prompts, explanation.scores, explanation.heads
    rows = {name: scores[name][0].mean(dim=1) for name in scores.metrics}
    if not layer_scores:
        rows = {name: by_layer.mean(dim=0, keepdim=True) for name, by_layer in rows.items()}
    return {
        **verdict(explanation),
        "facts": facts(explanation),
        "tokens": list(prompts.tokens[0]),
        "ids": prompts.ids[0].tolist(),
        "score_layers": list(scores.layers) if layer_scores else [],
        "scores": {name: [packed(row) for row in by_layer] for name, by_layer in rows.items()},
        "sinks": [row.nonzero().flatten().tolist() for row in explanation.sinks],
        "profile_layers": list(heads.layers),
        "profile": {name: _digits(getattr(heads, name)) for name in heads.statistics()},
    }


def certificate_rows(certificates: Sequence[Certificate]) -> list[list[Any]]:
    """One row of the page's table for each layer."""
    return [
        [
            c.layer,
            _rounded(c.value_error),
            None if c.output_error is None else _rounded(c.output_error),
            _rounded(c.tolerance),
            c.low_outputs,
            c.dtype,
            c.space,
        ]
        for c in certificates
    ]


def derived_edges(layer: LayerAttention) -> dict[str, Tensor]:
    """Everything of `DERIVED`, each [batch, head, query, key]."""
    factors = decompose(layer)
    signed = inter_head_contributions(layer)
    by_output = METRICS["value_weighted_output_normalized"]
    return {
        "attention": factors.attention,
        "value_weighted": METRICS["value_weighted"](layer),
        "value_weighted_output_normalized": by_output(layer),
        "contribution": signed.abs(),
        "signed_contribution": signed,
        "intra_head_contribution": intra_head_contributions(layer),
        "relative_norm": factors.relative_norm,
        "cosine": factors.cosine,
    }


RANGE_ROOM = {"largest": 1.23456e-300, "most": 1.23456e-300}
"""As long as any range, for sizes that are estimated before the edges are read."""


class Ranges:
    """Magnitudes of each quantity over all edges of a page, for one colour range of each."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sizes: dict[str, list[Tensor]] = {name: [] for name in names}

    def add(self, name: str, edges: Tensor) -> None:
        """Takes up edges of any shape, if the quantity is one of those shown."""
        if name in self._sizes:
            self._sizes[name].append(edges.detach().abs().flatten().to("cpu", torch.float32))

    def payload(self) -> dict[str, dict[str, float]]:
        """Of each quantity the largest magnitude, and what 99 % of the edges stay within."""
        found = {}
        for name, parts in self._sizes.items():
            sizes = torch.cat(parts) if parts else torch.zeros(1)
            largest = sizes.max().item() or 1.0
            most = sizes.kthvalue(math.ceil(0.99 * len(sizes))).values.item() or largest
            found[name] = {"largest": _rounded(largest), "most": _rounded(most)}
        return found


def layer_payload(
    layer: LayerAttention,
    heads: tuple[int, ...],
    tokens: tuple[int, ...],
    functions: Mapping[str, Metric],
    ranges: Ranges,
) -> dict[str, Any]:
    """The edges of one layer among the tokens and in the heads that are kept.

    Args:
        functions: metrics that the page's script does not derive from the others, by name.
        ranges: takes up the magnitudes of these edges.
    """
    keep_heads, keep_tokens = torch.tensor(heads), torch.tensor(tokens)

    def kept(edges: Tensor) -> Tensor:
        part = edges[0].cpu()[keep_heads][:, keep_tokens][:, :, keep_tokens]
        return triangle(part) if layer.causal else part

    payload: dict[str, Any] = {
        "index": layer.index,
        "causal": layer.causal,
        "heads": list(heads),
        "n_heads": layer.pattern.shape[1],
        "value_norm": floats(layer.projected_value_norm[0].cpu()[keep_heads][:, keep_tokens]),
        "output_norm": floats(layer.output_norm[0].cpu()[keep_tokens]),
    }
    stored = MATRICES if layer.gate is None else (*MATRICES, "relative_norm")
    for name, whole in derived_edges(layer).items():
        edges = kept(whole)
        ranges.add(name, edges)
        if name in stored:
            payload[name] = packed(edges)
    payload["own"] = {}
    for name, function in functions.items():
        edges = kept(function(layer).masked_fill(~layer.edge_mask[:, None], 0.0))
        ranges.add(name, edges)
        payload["own"][name] = {**packed(edges), "signed": bool((edges < 0).any())}
    return payload


def packed(values: Tensor) -> dict[str, Any]:
    """Numbers of any shape as base64 of 16-bit whole numbers, row by row, and their unit.

    Rounding moves each number by at most half a unit: largest magnitude / STEPS / 2.

    Raises:
        InputError: NaN or infinite numbers, which no page can draw.
    """
    values = values.detach().to("cpu", torch.float64)
    largest = values.abs().max().item() if values.numel() else 0.0
    if not largest < float("inf"):
        raise InputError(
            "the explanation holds NaN or infinite numbers, which a page cannot show. "
            "Check the model's weights and your own metrics."
        )
    unit = largest / STEPS
    whole = (values / unit).round() if unit > 0 else torch.zeros_like(values)
    data = whole.numpy().astype("<i2").tobytes()
    return {"unit": unit, "int16": base64.b64encode(data).decode("ascii")}


def floats(values: Tensor) -> dict[str, str]:
    """Numbers of any shape as base64 of 32-bit floats, row by row."""
    data = values.detach().to("cpu", torch.float32).numpy().astype("<f4").tobytes()
    return {"float32": base64.b64encode(data).decode("ascii")}


def script_json(data: Any) -> str:
    """JSON that is safe inside a script element: ASCII alone, no `<`, `>` or `&`."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def triangle(edges: Tensor) -> Tensor:
    """Lower triangles, head by head: query 0's one key, query 1's two, ..."""
    queries, keys = torch.tril_indices(edges.shape[-2], edges.shape[-1])
    return edges[..., queries, keys]


def _digits(values: Tensor) -> Any:
    """Nested lists of numbers with six significant digits."""
    if values.dim():
        return [_digits(part) for part in values]
    return _rounded(values.item())


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
