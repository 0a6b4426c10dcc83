"""The numbers of a page, as small as the eye allows: packed triangles and rounded lists."""

import base64
import math
from typing import Any

import numpy as np
from torch import Tensor

from cw_lens.geometry import decompose, inter_head_contributions, intra_head_contributions
from cw_lens.layer import LayerAttention
from cw_lens.studies.explain import Explanation
from cw_lens.views.budget import Plan

STEPS = 32767
"""A packed value is a whole number of scale / STEPS: finer than any colour bar."""


def payload(explanation: Explanation, plan: Plan, recipe: str) -> dict[str, Any]:
    """Everything that the page draws, ready for JSON; all text is plain and unescaped."""
    prompts = explanation.prompts
    mean_scores = {
        name: rounded(explanation.scores[name][0].mean(dim=(0, 1)))
        for name in explanation.scores.metrics
    }
    layer_scores = {
        name: rounded(explanation.scores[name][0].mean(dim=1)) if plan.score_layers else []
        for name in explanation.scores.metrics
    }
    return {
        "tokens": list(prompts.tokens[0]),
        "ids": prompts.ids[0].tolist(),
        "sinkLayers": explanation.sinks.sum(dim=0).tolist(),
        "layerCount": len(explanation.scores.layers),
        "meanScores": mean_scores,
        "layerScores": layer_scores,
        "heads": {
            name: rounded(getattr(explanation.heads, name))
            for name in explanation.heads.statistics()
        },
        "shownTokens": list(plan.tokens),
        "layers": [
            _layer(explanation.layers[row], heads, plan.tokens)
            for row, heads in zip(plan.layers, plan.heads, strict=True)
        ],
        "steps": STEPS,
        "verdict": verdict(explanation),
        "facts": facts(explanation),
        "omissions": list(plan.omissions),
        "certificates": [
            [c.layer, f"{c.value_error:.1e}", f"{c.output_error:.1e}", f"{c.tolerance:.0e}",
             c.low_outputs]
            for c in explanation.certificates
        ],
        "recipe": recipe,
    }


def packed(matrix: Tensor) -> dict[str, Any]:
    """Lower triangles of [head, query, key] as little-endian 16-bit integers in base64."""
    values = matrix.detach().cpu().double().numpy()
    rows, columns = np.tril_indices(values.shape[-1])
    triangle = values[:, rows, columns]
    scale = float(np.abs(triangle).max())
    steps = np.rint(triangle / (scale or 1.0) * STEPS).astype("<i2")
    return {"scale": scale, "data": base64.b64encode(steps.tobytes()).decode()}


def rounded(values: Tensor, digits: int = 4) -> Any:
    """Nested lists with so many significant digits."""

    def short(value: Any) -> Any:
        return [short(v) for v in value] if isinstance(value, list) else _significant(value, digits)

    return short(values.tolist())


def verdict(explanation: Explanation) -> str:
    """What the page shows, in two sentences."""
    heads, tokens = explanation.heads, explanation.prompts.tokens[0]
    attention = heads.first_attention.mean().item()
    given = heads.first_contribution.sum(dim=1).mean().item()
    said = (
        f"Averaged over layers, the first token “{tokens[0]}” receives {_percent(attention)} of "
        f"the attention and gives {_percent(given)} of what attention writes."
    )
    if len(tokens) == 1:
        return said
    scores = explanation.scores["contribution"][0].mean(dim=(0, 1))
    strongest = int(scores[1:].argmax()) + 1
    return f"{said} Among the others, “{tokens[strongest]}” (position {strongest}) gives most."


def facts(explanation: Explanation) -> list[list[str]]:
    """Name and value of what the page must say about its origin."""
    model, nll = explanation.model, explanation.nll
    worst = max(max(c.value_error, c.output_error) for c in explanation.certificates)
    tolerance = explanation.certificates[0].tolerance
    perplexity = f"{math.exp(nll.double().mean().item()):.2f}" if len(nll) else "none (one token)"
    sinks = explanation.sinks.sum(dim=1).float()
    begins = "a BOS token" if explanation.prompts.bos[0] else "no BOS token"
    return [
        ["Model", f"{model['name']} ({model['architecture']}, {model['n_layers']} layers × "
                  f"{model['n_heads']} heads, {model['dtype']})"],
        ["Text", f"{len(explanation.prompts.tokens[0])} tokens; the first is {begins}"],
        ["Perplexity", perplexity],
        ["Sinks", f"{sinks.mean().item():.1f} a layer, at most {int(sinks.max())} "
                  "(cosine of the layer's input to the first token's above 0.95)"],
        ["Certificate", f"Σ α v W_O equals every layer's output within {worst:.1e} "
                        f"(tolerance {tolerance:.0e})"],
        ["Weights", f"{model['weights']}, sha256 {model['weight_hash'][:16]}…"],
    ]


def _layer(layer: LayerAttention, heads: tuple[int, ...], tokens: tuple[int, ...]) -> dict:
    head, token = list(heads), list(tokens)

    def shown(edges: Tensor) -> dict[str, Any]:
        return packed(edges[0, head][:, token][:, :, token])

    return {
        "index": layer.index,
        "heads": head,
        "attention": shown(layer.pattern),
        "signed": shown(inter_head_contributions(layer)),
        "intra": shown(intra_head_contributions(layer)),
        "cosine": shown(decompose(layer).cosine),
        "valueNorm": rounded(layer.projected_value_norm[0, head][:, token]),
        "outputNorm": rounded(layer.output_norm[0, token]),
    }


def _significant(value: Any, digits: int) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %".replace("-", "−")
