"""What the explain page draws from, as JSON: numbers packed small, nothing that can be derived.

A page holds attention, signed contribution, intra-head contribution and cosine of each edge, and
the two vectors of lengths; its script derives value-weighted attention, |c| and relative norm.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cw_lens.certificates import Certificate
from cw_lens.errors import InputError
from cw_lens.geometry import decompose, inter_head_contributions, intra_head_contributions
from cw_lens.layer import LayerAttention
from cw_lens.metrics import Metric
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
        "scores": {
            name: {
                "signed": bool((by_layer < 0).any()),
                "layers": [packed(row) for row in by_layer],
            }
            for name, by_layer in rows.items()
        },
        "sinks": [row.nonzero().flatten().tolist() for row in explanation.sinks],
        "profile_layers": list(heads.layers),
        "profile": {name: _digits(getattr(heads, name)) for name in heads.statistics()},
    }


def certificate_rows(certificates: Sequence[Certificate]) -> list[list[Any]]:
    """One row of the page's table for each layer."""
    return [
        [
            c.layer,
            *_digits(torch.tensor([c.value_error, c.output_error or 0.0, c.tolerance])),
            c.low_outputs,
            c.dtype,
            c.space,
        ]
        for c in certificates
    ]


def layer_payload(
    layer: LayerAttention,
    heads: tuple[int, ...],
    tokens: tuple[int, ...],
    functions: Mapping[str, Metric],
) -> dict[str, Any]:
    """The edges of one layer among the tokens and in the heads that are kept.

    Args:
        functions: metrics that the page's script does not derive from the others, by name.
    """
    keep_heads, keep_tokens = torch.tensor(heads), torch.tensor(tokens)
    factors = decompose(layer)
    matrices = {
        "attention": factors.attention,
        "signed_contribution": inter_head_contributions(layer),
        "intra_head_contribution": intra_head_contributions(layer),
        "cosine": factors.cosine,
    }
    payload: dict[str, Any] = {
        "index": layer.index,
        "causal": layer.causal,
        "heads": list(heads),
        "value_norm": floats(layer.projected_value_norm[0].cpu()[keep_heads][:, keep_tokens]),
        "output_norm": floats(layer.output_norm[0].cpu()[keep_tokens]),
    }
    if layer.gate is not None:
        matrices["relative_norm"] = factors.relative_norm
    for name, function in functions.items():
        matrices[name] = function(layer).masked_fill(~layer.edge_mask[:, None], 0.0)
    for name in matrices:
        edges = matrices[name][0].cpu()[keep_heads][:, keep_tokens][:, :, keep_tokens]
        payload[name] = packed(triangle(edges) if layer.causal else edges)
        if name in functions:
            payload[name]["signed"] = bool((edges < 0).any())
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
    return float(f"{values.item():.6g}")
