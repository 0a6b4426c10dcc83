"""What a model loses as its sinks' values are scaled, replaced or cut: one unit a text and edit.

A unit is one run of one text under one edit of its values in the layers given (SPEC 6, 8). Units
of one text run as a batch.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from cw_lens import backend
from cw_lens.errors import InputError
from cw_lens.interventions import edited_rows
from cw_lens.noise import mixed, prompt_digest
from cw_lens.prompts import Prompts, repeated
from cw_lens.runs import attention_sites, layer_indices
from cw_lens.sinks import CrowdedSinksWarning, find_sinks
from cw_lens.studies.conditions import several
from cw_lens.studies.curves import NO_OP
from cw_lens.studies.losses import Clean, StudyText, losses, require_losses
from cw_lens.studies.text_batches import TextBatches, Units
from cw_lens.value_edits import CONTROL, FIRST, SINKS, SURGERY, EditPlan, ValueEdit

FACTORS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""What values are multiplied by, where nothing else is asked for (paper, figure 6c)."""

UNIT_COLUMNS: dict[str, type] = {
    "data": str,
    "example": int,
    "tokens": int,
    "edit": str,
    "target": str,
    "factor": float,
    "seed": int,
    "layers": str,
    "changed": int,
    "nll_sum": float,
    "clean_nll_sum": float,
    "kl_sum": float,
    "top1_agreed": int,
    "failed": str,
}
"""The columns of a table of units, and their types. `tokens` counts all, the first included; sums
are in nats over the predicted ones; `changed` counts (head, key) values over all layers; `failed`
says why the losses are NaN, and is empty where they are not."""

NO_CONTROL = "no token is neither the first, the last nor a sink"
NO_MEAN = "layer {}: no value beside those of the first token and the sinks"
NO_LOSS = "the {} loss is not finite"


def sweep_conditions(
    factors: Sequence[float] = FACTORS,
    *,
    targets: Sequence[str] = (FIRST, SINKS),
    surgery: Sequence[str] = SURGERY,
    seeds: int = 3,
) -> list[ValueEdit]:
    """The edits of a sweep, each on its own, controls among them.

    Values at each target scaled by each factor, and cut or replaced by each kind of surgery; as
    controls, with every seed, the value of a random token scaled alike, and the first token's
    value replaced by a random vector as long as factor times itself. A scale of 1 is the no-op
    run, which a `Sweep` makes in any case; a random vector times 0 is the removal again.

    Args:
        factors: finite numbers, also above 1 or negative.
        targets: of scaling and surgery: "first", "sinks" or both.
        surgery: kinds out of `SURGERY`; none, if empty.
        seeds: how many controls, at least 3.

    Raises:
        InputError: no factors, one that is not finite, an unknown target or kind, few seeds.
    """
    held = list(dict.fromkeys(factors)) if isinstance(factors, Sequence | np.ndarray) else []
    if not held:
        raise InputError(f"the factors are {factors!r}; give at least one, such as 0.5.")
    targets = several("targets", targets, (FIRST, SINKS))
    cuts = several("surgery", surgery, SURGERY) if surgery else []
    if not isinstance(seeds, int) or seeds < 3:
        raise InputError(f"{seeds!r} seeds of the controls are too few; use 3 or more.")
    scaled = [ValueEdit("scale", factor, target) for target in targets for factor in held]
    for seed in range(seeds):
        scaled += [ValueEdit("scale", factor, CONTROL, seed) for factor in held]
        scaled += [ValueEdit("random", factor, FIRST, seed) for factor in held if factor]
    cut = [ValueEdit(kind, 1.0, target) for target in targets for kind in cuts]
    return [edit for edit in scaled + cut if not edit.changes_nothing]


class Sweep(TextBatches[ValueEdit]):
    """The units of a list of edits on a list of texts."""

    def __init__(
        self,
        model: Any,
        texts: Sequence[StudyText],
        layers: Sequence[int],
        conditions: Sequence[ValueEdit],
        *,
        detector: str = "cosine",
        batch_size: int = 8,
        space: str = "residual",
        allow_folded: bool = False,
    ):
        """Refuses what would fail later.

        Args:
            model: a decoder of TransformerLens, or what `load_model` and `wrap_model` return.
            texts: each a batch of one.
            layers: those in which values are edited, all at once.
            conditions: as `sweep_conditions` gives them; the no-op run is added.
            detector: which keys are sinks: targets, left out of means, and never a control.
            batch_size: conditions of one text that run at a time.
            space, allow_folded: as `capture`.

        Raises:
            InputError: no texts, one without a token to predict, a batch size below 1, a layer
                that the model does not have, no conditions, one whose target is a number, an
                unknown detector or space, folded value biases.
            UnsupportedModelError: a model without next-token predictions, or that cannot be read.
        """
        require_losses(model, texts, batch_size)
        self.model, self.texts, self.allow_folded = model, list(texts), allow_folded
        self.layers = layer_indices(model, layers)
        attention_sites(model, self.layers, space=space, allow_folded=allow_folded)
        edits = [edit for edit in dict.fromkeys(conditions) if not edit.changes_nothing]
        numbered = [edit.target for edit in edits if isinstance(edit.target, int)]
        if not edits or numbered:
            what = f"the target {numbered[0]} is a number" if numbered else "no conditions"
            raise InputError(
                f"{what}: give edits of the first token, the sinks or a control, as "
                "sweep_conditions does. The run that changes nothing is made in any case."
            )
        online = any(edit.kind != "scale" or edit.target == SINKS for edit in edits)
        # everything is done that the edits need, but that nothing is changed
        self.no_op = ValueEdit(target=SINKS if online else FIRST)
        self.plan = EditPlan(None, [self.no_op], self.layers, detector, space)
        self.seeds = sorted({edit.seed for edit in edits if edit.target == CONTROL})
        chunks = [edits[at : at + batch_size] for at in range(0, len(edits), batch_size)]
        self.batches = [[self.no_op], *chunks]

    def batches_of(self, text: StudyText) -> list[list[ValueEdit]]:
        """The same for every text."""
        return self.batches

    def units_of(self, text: StudyText, clean: Clean) -> Callable[[Sequence[ValueEdit]], Units]:
        """As `TextBatches`; a text whose clean loss is NaN has nothing to be compared with."""
        if not math.isfinite(clean.nll_sum):
            reason = NO_LOSS.format("clean")
            return lambda edits: [self._failed(text, edit, clean, reason) for edit in edits]
        return partial(self._units, text, clean, self._controls(text.prompts))

    def _controls(self, prompts: Prompts) -> dict[int, int]:
        """Seed -> the number of its control token; none where no token may be one."""
        if not self.seeds:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CrowdedSinksWarning)
            sinks = find_sinks(
                self.model,
                prompts,
                self.plan.detector,
                layers=self.layers,
                space=self.plan.space,
                allow_folded=self.allow_folded,
            )
        tokens = control_tokens(prompts, sinks[0])
        return {seed: tokens[seed % len(tokens)] for seed in self.seeds if tokens}

    def _units(
        self,
        text: StudyText,
        clean: Clean,
        controls: Mapping[int, int],
        edits: Sequence[ValueEdit],
    ) -> Units:
        found = {}
        run = [edit for edit in edits if edit.target != CONTROL or edit.seed in controls]
        if run:
            prompts = repeated(text.prompts, len(run))
            drawn = [
                replace(edit, target=controls[edit.seed]) if edit.target == CONTROL else edit
                for edit in run
            ]
            plan = replace(self.plan, prompts=prompts, edits=drawn)
            with torch.no_grad(), edited_rows(self.model, plan) as done:
                logits = backend.forward(self.model, prompts)
        for row, edit in enumerate(run):
            unit = self._unit(text, edit) | losses(logits[row], text.prompts.ids[0], clean)
            unit |= {"changed": done.changed[row], "failed": ""}
            if row in done.lacking:
                unit = self._failed(text, edit, clean, NO_MEAN.format(done.lacking[row]))
            elif not math.isfinite(unit["nll_sum"] + unit["kl_sum"]):
                unit["failed"] = NO_LOSS.format("edited")
            found[edit] = unit
        return [found.get(edit) or self._failed(text, edit, clean, NO_CONTROL) for edit in edits]

    def _unit(self, text: StudyText, edit: ValueEdit) -> dict[str, Any]:
        """What a unit is; the one that changes nothing is the no-op run."""
        idle = edit.changes_nothing
        return {
            "data": text.data,
            "example": text.example,
            "tokens": text.prompts.ids.shape[1],
            "edit": NO_OP if idle else edit.kind,
            "target": "none" if idle else edit.target,
            "factor": float(edit.factor),
            "seed": edit.seed,
            "layers": layers_text(self.layers),
        }

    def _failed(
        self, text: StudyText, edit: ValueEdit, clean: Clean, reason: str
    ) -> dict[str, Any]:
        """The unit of an edit that cannot be made or compared."""
        return {
            **self._unit(text, edit),
            "changed": 0,
            "nll_sum": math.nan,
            "clean_nll_sum": clean.nll_sum,
            "kl_sum": math.nan,
            "top1_agreed": 0,
            "failed": reason,
        }


def control_tokens(prompts: Prompts, sinks: Bool[Tensor, "layer head key"]) -> list[int]:
    """The tokens of one text that a sink may be compared with, in a random order fixed by the text.

    Those that are a sink in no head and layer, and neither the first nor the last, whose value no
    prediction that counts reads.
    """
    free = ~sinks.flatten(0, 1).any(dim=0)
    free[[0, -1]] = False
    digest = mixed(prompt_digest(prompts.ids, prompts.mask))
    order = mixed(digest + torch.arange(len(free), device=digest.device)).argsort().tolist()
    return [token for token in order if free[token]]


def layers_text(layers: Sequence[int]) -> str:
    """Layers in order as ranges: 0-3,5."""
    runs = [
        [layer for _, layer in held]
        for _, held in groupby(enumerate(layers), lambda place: place[1] - place[0])
    ]
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
