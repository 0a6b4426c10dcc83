"""Runs and explanations as pages: heads, tokens, the overview, and all of them at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cw_lens.errors import InputError, require_known
from cw_lens.metrics import Metric
from cw_lens.runs import Run
from cw_lens.studies.explain import Explanation, explanations
from cw_lens.studies.heads import HeadProfile
from cw_lens.views.budget import Selection, fits_layer_scores, select
from cw_lens.views.offered import FACTORS, Metrics, offered_metrics, text_metrics
from cw_lens.views.page import Page, document
from cw_lens.views.payload import (
    DERIVED,
    MATRICES,
    RANGE_ROOM,
    Ranges,
    certificate_rows,
    layer_payload,
    prompt_payload,
    script_json,
)

SIZE_BUDGET = 25e6
"""What a page may take, in bytes, where nothing else is said."""
NO_LAYER_SCORES = "Token scores layer by layer. Kept: their mean over layers."


@dataclass(frozen=True)
class _Shown:
    """What a page shows of its texts, and how it begins."""

    sections: tuple[str, ...]
    title: str
    view: bool = True
    recipe: str | None = None
    metrics: tuple[str, ...] = DERIVED
    text_metrics: tuple[str, ...] = ()
    functions: Mapping[str, Metric] = field(default_factory=dict)
    statistics: tuple[str, ...] = ()
    start_layer: int | None = None
    start_query: int | None = None


def show_heads(
    run: Run[Any],
    layer: int | None = None,
    *,
    metrics: Metrics | None = None,
    size_budget: float = SIZE_BUDGET,
) -> Page:
    """All heads of a layer beside one large map, by attention, contribution or their factors.

    A switch changes the quantity, a slider the layer, a selector the prompt of a batch; the mean
    over heads stands before the heads. All heads and layers share one colour range for each
    quantity, printed with it. Hovering tells query, key, attention, relative norm, cosine and
    contribution. Above the size budget the strongest layers, heads and tokens are kept, and the
    page says what was left out.

    Args:
        run: from `capture`, with the layers that the page is to hold.
        layer: the number of the layer shown first; negative numbers count from the run's last.
            By default that in which the first token's attention and contribution differ most.
        metrics: what the switch offers, the first shown first: names of `METRICS`,
            `relative_norm`, `cosine`, or functions of your own by name. By default the signed
            contribution and everything that is derived with it (SPEC 3; paper, sections 4.2, 5.2).
        size_budget: what the page may take, in bytes.

    Raises:
        InputError: an unknown layer or metric, a run whose layers were reduced, a metric that
            gives NaN, or a budget too small for any page.
    """
    texts = explanations(run)
    names, functions = offered_metrics(metrics)
    shown = _Shown(
        ("grid", "factors"),
        "Heads",
        metrics=names,
        functions=functions,
        start_layer=_layer(run, layer, texts[0]),
    )
    return _page(texts, shown, size_budget)


def show_tokens(
    run: Run[Any],
    *,
    query: int | None = None,
    metrics: Metrics | None = None,
    size_budget: float = SIZE_BUDGET,
) -> Page:
    """The text twice, coloured by attention above and by contribution below.

    The colours are token scores (SPEC 4), or what one token, the query, receives from each: click
    a token to make it the query. Per layer and head, or averaged.

    Args:
        run: from `capture`.
        query: the position of the query shown first, among the real tokens of the first prompt;
            negative numbers count from its last. By default token scores are shown.
        metrics: what the lower line offers, the first shown first, as `show_heads`.
        size_budget: what the page may take, in bytes.

    Raises:
        InputError: an unknown query or metric, or as `show_heads`.
    """
    names, functions = offered_metrics(metrics)
    scored = functions | {name: FACTORS[name] for name in names if name in FACTORS}
    texts = explanations(run, scored)
    length = texts[0].prompts.ids.shape[1]
    if query is not None and not -length <= query < length:
        raise InputError(
            f"there is no query {query}; the first prompt has tokens 0 to {length - 1}."
        )
    start = None if query is None else query % length
    offered = text_metrics(texts[0]) if metrics is None else names
    shown = _Shown(
        ("text",),
        "Tokens",
        metrics=names,
        text_metrics=offered,
        functions=functions,
        start_query=start,
    )
    return _page(texts, shown, size_budget)


def show_overview(
    run: Run[Any],
    statistic: str | Sequence[str] | None = None,
    *,
    size_budget: float = SIZE_BUDGET,
) -> Page:
    """Maps of layer by head; a click on a cell opens that head below.

    Args:
        run: from `capture`.
        statistic: names of `HeadProfile`'s statistics, such as `first_contribution`, `gross` or
            `sink_cosine`; by default all of them.
        size_budget: what the page may take, in bytes.

    Raises:
        InputError: an unknown statistic, or as `show_heads`.
    """
    texts = explanations(run)
    names = (statistic,) if isinstance(statistic, str) else tuple(statistic or ())
    for name in names:
        require_known("statistic", name, HeadProfile.statistics())
    shown = _Shown(("maps", "factors"), "Every layer and head", statistics=names)
    return _page(texts, shown, size_budget)


def explain_page(
    explanation: Explanation, *, size_budget: float = SIZE_BUDGET, recipe: str | None = None
) -> Page:
    """A page that shows one explanation: text, layer and head maps, head grid, factors, proofs.

    Its size is known before it is made. Above the budget the strongest layers are kept, then
    heads, then tokens, and the page says what was left out.

    Args:
        explanation: from `explain`.
        size_budget: what the page may take, in bytes; its scripts alone take 2.6 MB.
        recipe: the command that makes this page again.

    Raises:
        InputError: a budget too small for any page, NaN, or layers that are not whole.
    """
    n_tokens = explanation.prompts.ids.shape[1]
    for layer in explanation.layers:
        if tuple(layer.pattern.shape[::2]) != (1, n_tokens) or layer.pattern.shape[3] != n_tokens:
            raise InputError(
                f"layer {layer.index} has a pattern of shape {tuple(layer.pattern.shape)} (batch, "
                f"head, query, key); a page shows one text, here of {n_tokens} tokens, whole."
            )
    name = explanation.model.get("name", "")
    shown = _Shown(
        ("text", "maps", "grid", "factors"),
        f"Contribution weights · {name}",
        view=False,
        recipe=recipe,
        metrics=("signed_contribution", *(n for n in DERIVED if n != "signed_contribution")),
        text_metrics=text_metrics(explanation),
    )
    return _page((explanation,), shown, size_budget)


def _layer(run: Run[Any], layer: int | None, text: Explanation) -> int:
    """The number of the layer to begin with."""
    held = [one.index for one in run.layers]
    if layer is None:
        heads = text.heads
        gap = heads.first_attention.mean(dim=1) - heads.first_contribution.sum(dim=1)
        return held[int(gap.abs().argmax())]
    index = held[-1] + 1 + layer if layer < 0 else layer
    if index not in held:
        raise InputError(
            f"the run does not hold layer {layer}; it holds {', '.join(map(str, held))}. Capture "
            "it with capture(model, prompts, layers=[...])."
        )
    return index


def _page(texts: Sequence[Explanation], shown: _Shown, size_budget: float) -> Page:
    """The page of these texts, each of which takes an equal part of the budget."""
    share = size_budget / len(texts)
    layer_scores = [fits_layer_scores(text, share) for text in texts]
    prompts = [
        prompt_payload(text, layer_scores=whole)
        for text, whole in zip(texts, layer_scores, strict=True)
    ]
    coloured = shown.metrics if "grid" in shown.sections else ()
    payload: dict[str, Any] = {
        "title": shown.title,
        "difference": None,
        "recipe": shown.recipe,
        "sections": list(shown.sections),
        "metrics": list(shown.metrics),
        "text_metrics": list(shown.text_metrics),
        "ranges": dict.fromkeys(coloured, RANGE_ROOM),  # until the edges are read
        "held_metrics": list(shown.functions),
        "signed": [],
        "told": _told(shown),
        "statistics": list(shown.statistics),
        "start_layer": shown.start_layer,
        "start_query": shown.start_query,
        "certificates": certificate_rows(texts[0].certificates),
    }
    around = len(document(script_json(payload), shown.sections, view=shown.view).encode())
    omissions: list[str] = []
    estimated = 0
    ranges = Ranges(coloured)
    for place, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        selection = select(
            text,
            fixed_bytes=around // len(texts) + len(script_json(prompt)),
            size_budget=share,
            texts=len(texts),
            matrices=len(MATRICES) + len(shown.functions),
            first_layer=shown.start_layer,
            first_query=shown.start_query if place == 0 else None,
        )
        estimated += selection.estimated_bytes
        _fill(prompt, text, selection, shown.functions, ranges)
        left_out = ((NO_LAYER_SCORES,) if not layer_scores[place] else ()) + selection.omissions
        of = f"Prompt {place}: " if len(texts) > 1 else ""
        omissions += [of + sentence for sentence in left_out]
    payload["signed"] = _signed(prompts, shown.functions)
    payload["omissions"] = omissions
    payload["prompts"] = prompts
    payload["ranges"] = ranges.payload()
    made = document(script_json(payload), shown.sections, view=shown.view)
    return Page(made, estimated, tuple(omissions))


def _told(shown: _Shown) -> list[str]:
    """What hovering over an edge tells: attention, the other factors, the product, and more."""
    factors = ("attention", "relative_norm", "cosine", "signed_contribution")
    return [*factors, *(name for name in shown.metrics if name in shown.functions)]


def _fill(
    prompt: dict[str, Any],
    text: Explanation,
    selection: Selection,
    functions: Mapping[str, Metric],
    ranges: Ranges,
) -> None:
    chosen = {layer.index: layer for layer in text.layers}
    whole = len(selection.tokens) == text.prompts.ids.shape[1]
    prompt["held_tokens"] = None if whole else selection.tokens
    prompt["layers"] = [
        layer_payload(chosen[index], heads, selection.tokens, functions, ranges)
        for index, heads in selection.heads.items()
    ]


def _signed(prompts: Sequence[dict[str, Any]], functions: Mapping[str, Callable]) -> list[str]:
    """The metrics of one's own that are negative somewhere on the page."""
    layers = [layer for prompt in prompts for layer in prompt["layers"]]
    return [name for name in functions if any(layer["own"][name]["signed"] for layer in layers)]
