"""What of an explanation a page can hold: decided from shapes, before anything is drawn."""

from dataclasses import dataclass

from cw_lens.errors import InputError
from cw_lens.studies.explain import Explanation

MAX_CELLS = 300_000
"""Cells that a head grid can draw and stay quick under the mouse."""
MATRICES = 4  # attention, signed contribution, intra-head contribution, cosine
_CELL_BYTES = MATRICES * 2 * 4 / 3  # 16-bit integers in base64
_NUMBER_BYTES = 10  # a rounded number and its comma in JSON
_TOKEN_BYTES = 40


@dataclass(frozen=True)
class Plan:
    """What the page shows.

    Attributes:
        layers: positions in `explanation.layers` of the layers shown whole.
        heads: for each of them, the heads shown.
        tokens: the tokens that the head grids show, in order.
        score_layers: whether the text can be coloured by one layer's scores, or by the mean only.
        estimated_bytes: size of the page.
        omissions: what was left out and why, one sentence each.
    """

    layers: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    score_layers: bool
    estimated_bytes: int
    omissions: tuple[str, ...]


def plan_page(explanation: Explanation, size_budget: float, fixed_bytes: int) -> Plan:
    """The most of an explanation that fits, the strongest layers, heads and tokens first.

    A layer's and a head's strength is its gross contribution, a token's its contribution score
    averaged over layers and heads; the first token is always kept.

    Raises:
        InputError: not even one layer, head and token fit.
    """
    scores = explanation.scores["contribution"][0]
    n_tokens, n_heads = scores.shape[-1], scores.shape[1]
    gross = explanation.heads.gross[[layer.index for layer in explanation.layers]]
    layers = gross.sum(dim=1).argsort(descending=True, stable=True).tolist()
    heads = gross.argsort(dim=1, descending=True, stable=True).tolist()
    strength = scores.mean(dim=(0, 1)).clone()
    strength[0] = float("inf")
    tokens = strength.argsort(descending=True, stable=True).tolist()
    shown = [len(layers), n_heads, min(n_tokens, max(1, int((MAX_CELLS / n_heads) ** 0.5)))]
    score_layers = True

    def size() -> int:
        layer_count, head_count, token_count = shown
        cells = token_count * (token_count + 1) // 2
        grids = layer_count * head_count * (cells * _CELL_BYTES + token_count * _NUMBER_BYTES * 2)
        rows = len(explanation.scores.layers) if score_layers else 1
        text = n_tokens * (rows * len(explanation.scores.metrics) * _NUMBER_BYTES + _TOKEN_BYTES)
        maps = explanation.heads.gross.numel() * len(explanation.heads.statistics())
        return int(fixed_bytes + grids + text + maps * _NUMBER_BYTES)

    if size() > size_budget:
        rows = len(explanation.scores.layers) * len(explanation.scores.metrics)
        score_layers = n_tokens * rows * _NUMBER_BYTES < size_budget / 4
    for axis in range(3):
        while size() > size_budget and shown[axis] > 1:
            shown[axis] -= 1 if axis < 2 else max(1, shown[axis] // 20)
    if size() > size_budget:
        raise InputError(
            f"the smallest page needs {size() / 1e6:.1f} MB and the budget is "
            f"{size_budget / 1e6:.1f} MB. Raise size_budget (--size-budget)."
        )
    kept = sorted(layers[: shown[0]])
    return Plan(
        layers=tuple(kept),
        heads=tuple(tuple(sorted(heads[row][: shown[1]])) for row in kept),
        tokens=tuple(sorted(tokens[: shown[2]])),
        score_layers=score_layers,
        estimated_bytes=size(),
        omissions=_omissions(explanation, layers[shown[0] :], shown, score_layers),
    )


def _omissions(
    explanation: Explanation, dropped: list[int], shown: list[int], score_layers: bool
) -> tuple[str, ...]:
    n_tokens, n_heads = explanation.prompts.ids.shape[1], explanation.heads.gross.shape[1]
    said = []
    if dropped:
        numbers = ", ".join(str(explanation.layers[row].index) for row in sorted(dropped))
        said.append(f"head grids of layers {numbers} (smallest gross contribution)")
    if shown[1] < n_heads:
        said.append(
            f"{n_heads - shown[1]} of {n_heads} heads of each grid (smallest gross contribution)"
        )
    if shown[2] < n_tokens:
        said.append(
            f"{n_tokens - shown[2]} of {n_tokens} tokens in the head grids (smallest contribution "
            "score)"
        )
    if not score_layers:
        said.append("token scores layer by layer: the text shows their mean over layers")
    return tuple(said)
