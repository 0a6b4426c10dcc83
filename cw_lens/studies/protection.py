"""How much of its texts a sink detector protects from removal, layer by layer (SPEC 5)."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from cw_lens.runs import layer_indices
from cw_lens.sinks import CrowdedSinksWarning, find_sinks, protected_share, warn_if_crowded
from cw_lens.studies.losses import StudyText


def protected_shares(
    model: Any,
    texts: Sequence[StudyText],
    detector: str,
    *,
    space: str = "residual",
    allow_folded: bool = False,
) -> dict[int, float]:
    """Layer -> share of its (head, token) pairs that are sinks of a clean run, over all texts.

    Raises as `find_sinks`.

    Warns:
        CrowdedSinksWarning: once, where that is so large that little is left to remove.
    """
    found = []
    for text in texts:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CrowdedSinksWarning)
            sinks = find_sinks(
                model, text.prompts, detector, space=space, allow_folded=allow_folded
            )
        found.append(sinks.cpu())
    marked = torch.cat(found, dim=-1)
    everywhere = torch.ones(1, marked.shape[-1], dtype=torch.bool)
    layers = layer_indices(model, None)
    warn_if_crowded(marked, everywhere, layers, detector)
    return dict(zip(layers, protected_share(marked, everywhere).tolist(), strict=True))
