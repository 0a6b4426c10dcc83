"""cw_lens: contribution weights beside attention, for any decoder (arXiv 2606.07604).

Names load on first use, so that importing the package costs nothing and touches no network.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cw_lens.certificates import IdentityError as IdentityError
    from cw_lens.checks import Diagnosis as Diagnosis
    from cw_lens.checks import doctor as doctor
    from cw_lens.corpora import load_corpus as load_corpus
    from cw_lens.errors import CWLensError as CWLensError
    from cw_lens.errors import CWLensWarning as CWLensWarning
    from cw_lens.errors import InputError as InputError
    from cw_lens.geometry import Decomposition as Decomposition
    from cw_lens.geometry import Interference as Interference
    from cw_lens.geometry import bias_share as bias_share
    from cw_lens.geometry import decompose as decompose
    from cw_lens.geometry import inter_head_contributions as inter_head_contributions
    from cw_lens.geometry import interference as interference
    from cw_lens.geometry import intra_head_contributions as intra_head_contributions
    from cw_lens.geometry import low_outputs as low_outputs
    from cw_lens.geometry import pairwise_interference as pairwise_interference
    from cw_lens.geometry import projected_value_norms as projected_value_norms
    from cw_lens.geometry import projections as projections
    from cw_lens.geometry import target_contributions as target_contributions
    from cw_lens.images import prompts_from_images as prompts_from_images
    from cw_lens.interventions import edited_values as edited_values
    from cw_lens.interventions import masked_values as masked_values
    from cw_lens.interventions import replaced_values as replaced_values
    from cw_lens.interventions import scaled_values as scaled_values
    from cw_lens.layer import LayerAttention as LayerAttention
    from cw_lens.layer import layer_attention as layer_attention
    from cw_lens.metrics import METRICS as METRICS
    from cw_lens.models import load_model as load_model
    from cw_lens.prompts import Prompts as Prompts
    from cw_lens.prompts import prompts_from_ids as prompts_from_ids
    from cw_lens.prompts import tokenize as tokenize
    from cw_lens.removal import removal_plan as removal_plan
    from cw_lens.runs import Run as Run
    from cw_lens.runs import capture as capture
    from cw_lens.runs import from_cache as from_cache
    from cw_lens.runs import next_token_nll as next_token_nll
    from cw_lens.scores import TokenScores as TokenScores
    from cw_lens.scores import token_scores as token_scores
    from cw_lens.sinks import SINK_DETECTORS as SINK_DETECTORS
    from cw_lens.sinks import find_sinks as find_sinks
    from cw_lens.statistics import Estimate as Estimate
    from cw_lens.statistics import bootstrap_mean as bootstrap_mean
    from cw_lens.studies.curves import RemovalCurves as RemovalCurves
    from cw_lens.studies.curves import removal_curves as removal_curves
    from cw_lens.studies.explain import Explanation as Explanation
    from cw_lens.studies.explain import explain as explain
    from cw_lens.studies.faithfulness import faithfulness as faithfulness
    from cw_lens.studies.sinks import SinkProfile as SinkProfile
    from cw_lens.studies.sinks import sink_profile as sink_profile
    from cw_lens.studies.sinks import sink_sweep as sink_sweep
    from cw_lens.studies.sweep_results import SweepCurves as SweepCurves
    from cw_lens.studies.sweep_results import sweep_curves as sweep_curves
    from cw_lens.value_edits import EditPlan as EditPlan
    from cw_lens.value_edits import ValueEdit as ValueEdit
    from cw_lens.views import Page as Page
    from cw_lens.views import compare as compare
    from cw_lens.views import explain_page as explain_page
    from cw_lens.views import show_heads as show_heads
    from cw_lens.views import show_overview as show_overview
    from cw_lens.views import show_tokens as show_tokens
    from cw_lens.wrapping import wrap_model as wrap_model

__version__ = "0.1.0"

_HOME = {
    "errors": ["CWLensError", "CWLensWarning", "InputError"],
    "checks": ["Diagnosis", "doctor"],
    "certificates": ["IdentityError"],
    "runs": ["Run", "capture", "from_cache", "next_token_nll"],
    "geometry": [
        "Decomposition",
        "Interference",
        "bias_share",
        "decompose",
        "inter_head_contributions",
        "interference",
        "intra_head_contributions",
        "low_outputs",
        "pairwise_interference",
        "projected_value_norms",
        "projections",
        "target_contributions",
    ],
    "corpora": ["load_corpus"],
    "images": ["prompts_from_images"],
    "interventions": ["edited_values", "masked_values", "replaced_values", "scaled_values"],
    "layer": ["LayerAttention", "layer_attention"],
    "metrics": ["METRICS"],
    "models": ["load_model"],
    "prompts": ["Prompts", "prompts_from_ids", "tokenize"],
    "removal": ["removal_plan"],
    "scores": ["TokenScores", "token_scores"],
    "sinks": ["SINK_DETECTORS", "find_sinks"],
    "statistics": ["Estimate", "bootstrap_mean"],
    "studies.curves": ["RemovalCurves", "removal_curves"],
    "studies.explain": ["Explanation", "explain"],
    "studies.faithfulness": ["faithfulness"],
    "studies.sinks": ["SinkProfile", "sink_profile", "sink_sweep"],
    "studies.sweep_results": ["SweepCurves", "sweep_curves"],
    "value_edits": ["EditPlan", "ValueEdit"],
    "views": ["Page", "compare", "explain_page", "show_heads", "show_overview", "show_tokens"],
    "wrapping": ["wrap_model"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    """The public name, imported from its module at first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cw_lens' has no attribute {name!r}")
    return getattr(import_module(f"cw_lens.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
