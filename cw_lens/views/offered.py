"""Which quantities a page offers, and the functions of those that its script does not derive."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cw_lens.errors import InputError
from cw_lens.geometry import decompose
from cw_lens.layer import LayerAttention
from cw_lens.metrics import METRICS, Metric
from cw_lens.scores import resolve_metrics
from cw_lens.studies.explain import Explanation
from cw_lens.views.payload import DERIVED

Metrics = Sequence[str] | Mapping[str, Metric]


def _relative_norm(layer: LayerAttention) -> Tensor:
    return decompose(layer).relative_norm


def _cosine(layer: LayerAttention) -> Tensor:
    return decompose(layer).cosine


FACTORS = {"relative_norm": _relative_norm, "cosine": _cosine}
"""The two factors of a contribution that are no metrics of `METRICS`."""


def text_metrics(text: Explanation) -> tuple[str, ...]:
    """What tokens may be coloured by where nothing else is said, the first shown first."""
    return tuple(dict.fromkeys(("contribution", *DERIVED, *text.scores.metrics)))


def offered_metrics(metrics: Metrics | None) -> tuple[tuple[str, ...], dict[str, Metric]]:
    """The names that a page offers, and the functions of those it does not derive itself."""
    if metrics is None:
        first = "signed_contribution"
        return (first, *(name for name in DERIVED if name != first)), {}
    if isinstance(metrics, Mapping):
        resolved = resolve_metrics(metrics)
        functions = {
            name: function
            for name, function in resolved.items()
            if name not in DERIVED or function is not METRICS.get(name)
        }
        for name in functions:
            if name in DERIVED:
                raise InputError(
                    f"a metric of your own is called {name!r}, which the page has already; give "
                    "it another name."
                )
        return tuple(resolved), functions
    names = (metrics,) if isinstance(metrics, str) else tuple(dict.fromkeys(metrics))
    others = [name for name in names if name not in DERIVED]
    functions = resolve_metrics(others) if others else {}
    if not names:
        raise InputError("metrics is empty; name at least one, or leave it out for all.")
    return names, functions
