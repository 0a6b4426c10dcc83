"""Where each quantity of a layer's attention is in a loaded model, architecture by architecture.

Told from what the model has rather than from its name. A TransformerBridge (4.x, 3.9) and a
HookedTransformer (3.9) are told apart in the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from cw_lens.errors import CWLensError, InputError, spans
from cw_lens.norms import OutputNorm, output_norm

GATES = ("hook_q_gate", "hook_gate")
"""Hook points at which TransformerLens shows a gate on sum(alpha v), before its sigmoid."""

LN1_AFTER_ATTENTION = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures whose HookedTransformer applies its ln1 to what the attention returns."""

INNER_NORMS = ("attn_sub_norm", "sub_norm", "inner_attn_ln")
"""Names that architectures give a norm between sum(alpha v) and the output matrix."""


ENCODER_DECODER = (
    "it is an encoder with a decoder, whose cross-attention reads another sequence than the one "
    "it writes to; cw_lens reads decoders and encoders that stand alone. Use a decoder-only or "
    "encoder-only model."
)


class UnsupportedModelError(CWLensError, RuntimeError):
    """The model's attention is not of the form sum(alpha v) W_O, or cannot be read."""


@dataclass(frozen=True)
class AttentionSite:
    """Where one layer's attention is in a loaded model.

    Attributes:
        index: the layer's number.
        points: the module whose output each part is: residual (the layer's input), value,
            pattern, z, output (of the output matrix), and where the model has them gate
            (on sum(alpha v), before its sigmoid) and normed (the output after its norm).
        attention: the attention module, which runs all of these but residual and normed.
        weight: output matrix, heads one after the other, in the model's dtype, on its device.
        b_O: output bias, or None.
        norm: of the output, or None.
        multiplier: what the output is multiplied by before it joins the residual stream.
        clamp: values are cut to [-clamp, clamp] before they are used, where not None.
        heads_first: whether the value's hook point holds heads before positions.
        folded: whether the value biases have been folded into b_O.
    """

    index: int
    points: Mapping[str, nn.Module]
    attention: nn.Module
    weight: Float[Tensor, "features d_model"]
    b_O: Float[Tensor, " d_model"] | None
    norm: OutputNorm | None = None
    multiplier: float = 1.0
    clamp: float | None = None
    heads_first: bool = False
    folded: bool = False

    def W_O(self, heads: int) -> Float[Tensor, "head d_head d_model"]:  # noqa: N802
        """The output matrix, split by head."""
        return rearrange(self.weight.detach(), "(head d) model -> head d model", head=heads)

    def arranged(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the hook points saw, as the model used it: heads before positions, gate open.

        Values are clamped and the gate has its sigmoid. Grouped values keep their groups.
        """
        heads = seen["pattern"].shape[1]
        parts = dict(seen)
        for part in ("value", "z", "gate"):
            if part in seen:
                parts[part] = self.by_head(part, seen[part], heads)
        if self.clamp is not None:
            parts["value"] = parts["value"].clamp(-self.clamp, self.clamp)
        if "gate" in parts:
            parts["gate"] = parts["gate"].sigmoid()
        return parts

    def by_head(
        self, part: str, tensor: Tensor, heads: int
    ) -> Float[Tensor, "batch head position d_head"]:
        """A hook point's tensor with its heads apart and before the positions."""
        if part == "value" and self.heads_first:
            return tensor
        return rearrange(
            tensor.flatten(2),
            "batch position (head d) -> batch head position d",
            d=len(self.weight) // heads,
        )


def is_bridge(model: Any) -> bool:
    """Whether the model is a TransformerBridge over a Hugging Face model."""
    return hasattr(model, "original_model")


def attention_layers(model: Any) -> list[int]:
    """The numbers of the layers that have attention; hybrids have others too.

    Raises:
        UnsupportedModelError: none has, or the model is an encoder with a decoder.
    """
    blocks = _blocks(model)
    layers = [i for i, block in enumerate(blocks) if getattr(block, "attn", None) is not None]
    if not layers:
        raise UnsupportedModelError(
            f"TransformerLens shows attention in none of the {len(blocks)} layers "
            f"({type(blocks[0]).__name__}), so there are no attention weights to set contributions "
            "beside. Use a model with attention that it shows."
        )
    return layers


def attention_sites(model: Any, layers: Sequence[int]) -> list[AttentionSite]:
    """Where the attention of each of these layers is; raises as `attention_site`."""
    _blocks(model)
    hooks = model.hook_dict  # a bridge gathers it anew at each look
    return [attention_site(model, layer, hooks) for layer in layers]


def attention_site(
    model: Any, layer: int, hooks: Mapping[str, nn.Module] | None = None
) -> AttentionSite:
    """Where `layer`'s attention is, out of the model's `hook_dict`.

    Raises:
        UnsupportedModelError: there is none, or it is not of the form sum(alpha v) W_O.
    """
    block = _blocks(model)[layer]
    attention = getattr(block, "attn", None)
    if attention is None:
        raise UnsupportedModelError(
            f"layer {layer} has no attention ({type(block).__name__}); those that have are "
            f"{spans(attention_layers(model))}. Leave it out with layers=."
        )
    inner = getattr(attention, "original_component", attention)
    for name in INNER_NORMS:
        if getattr(inner, name, None) is not None:
            raise UnsupportedModelError(
                f"layer {layer}: a norm ({name}) stands between sum of alpha v and the output "
                "matrix. It divides by the length of the sum, so no part of the output is any one "
                "token's and contributions do not exist. Use a model without such a norm."
            )
    known: Mapping[str, nn.Module] = model.hook_dict if hooks is None else hooks
    names = {part: name for part, name in cache_names(model, layer).items() if part != "output"}
    missing = [name for name in names.values() if name not in known]
    if missing:
        raise UnsupportedModelError(
            f"layer {layer} has no {', '.join(missing)}: TransformerLens does not show this "
            "attention's parts. If load_model or wrap_model, which force eager attention, made the "
            "model, its architecture is not supported; else load it with them."
        )
    points: dict[str, nn.Module] = {part: known[name] for part, name in names.items()}
    norm_name = _norm_name(block)
    norm_module = None if norm_name is None else getattr(block, norm_name)
    projection = getattr(attention, "o", None)
    if projection is None:  # HookedTransformer: the attention module returns the layer's output
        points["output"] = attention
        weight, b_O = attention.W_O.flatten(0, 1), attention.b_O
    else:
        points["output"] = projection.hook_out
        linear = projection.original_component
        # GPT-2's Conv1D keeps [in, out], every other linear layer [out, in]
        weight = linear.weight if type(linear).__name__ == "Conv1D" else linear.weight.T
        b_O = linear.bias
    if not weight.is_floating_point():
        raise UnsupportedModelError(
            f"layer {layer}: the output matrix is stored as {weight.dtype}, quantised, and cannot "
            "be read. Load the model unquantised, with dtype=float32 or bfloat16."
        )
    outer = getattr(block, "original_component", block)
    return AttentionSite(
        index=layer,
        points=points,
        attention=attention,
        weight=weight,
        b_O=b_O,
        norm=None if norm_module is None else output_norm(norm_module, weight),
        multiplier=_multiplier(outer),
        clamp=_clamp(inner),
        heads_first=hasattr(attention, "kv_b_proj"),
        folded=_folds_value_bias(model, attention, b_O),
    )


def cache_names(model: Any, layer: int) -> dict[str, str]:
    """The name that an ActivationCache gives each part that the layer has."""
    prefix = f"blocks.{layer}"
    block, bridge = _blocks(model)[layer], is_bridge(model)
    value = "v_norm.hook_out" if hasattr(block.attn, "v_norm") else "hook_v"
    names = {
        "residual": f"{prefix}.hook_resid_pre",
        "value": f"{prefix}.attn.{value}",
        "pattern": f"{prefix}.attn.hook_pattern",
        "z": f"{prefix}.attn.hook_z",
        "output": f"{prefix}.attn.o.hook_out" if bridge else f"{prefix}.hook_attn_out",
    }
    for gate in GATES:
        if hasattr(block.attn, gate):
            names["gate"] = f"{prefix}.attn.{gate}"
    norm = _norm_name(block)
    if norm is not None:
        names["normed"] = f"{prefix}.{norm}.hook_out" if bridge else names.pop("output")
    return names


def weight_state(model: Any) -> tuple[str, ...]:
    """What TransformerLens has done to the weights; ("raw",) where nothing."""
    state = []
    normalization = str(getattr(model.cfg, "normalization_type", ""))
    if getattr(model, "compatibility_mode", False) or getattr(model, "_weights_processed", False):
        state.append("compatibility mode")
    elif normalization.endswith("Pre"):
        state.append("layer norm folded")
    sites = attention_sites(model, attention_layers(model))
    if any(site.folded for site in sites):
        state.append("value biases folded")
    if all(_centred(site.weight) for site in sites):
        state.append("writing weights centred")
    return tuple(state) or ("raw",)


def _blocks(model: Any) -> Any:
    if not hasattr(model, "run_with_cache"):
        raise InputError(
            f"a {type(model).__name__} is no TransformerLens model. Load one with load_model, or "
            "wrap a Hugging Face model with wrap_model."
        )
    blocks = getattr(model, "blocks", None)
    config = getattr(getattr(model, "original_model", None), "config", None)
    if blocks is None and getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"the model is refused: {ENCODER_DECODER}")
    if not blocks:
        raise UnsupportedModelError(
            "the model has no layers where TransformerLens keeps them (blocks). Use a decoder or "
            "an encoder with attention layers."
        )
    return blocks


def _norm_name(block: Any) -> str | None:
    """The block's norm after the output matrix: what TransformerLens says the attention adds."""
    alias = getattr(block, "hook_aliases", {}).get("hook_attn_out", "")
    if alias.endswith(".hook_out") and not alias.startswith("attn."):
        return alias.removesuffix(".hook_out")
    if getattr(getattr(block, "cfg", None), "original_architecture", None) in LN1_AFTER_ATTENTION:
        return "ln1"
    return "ln1_post" if getattr(block, "ln1_post", None) is not None else None


def _multiplier(block: Any) -> float:
    """What Granite and Falcon-H1 multiply the output by before it joins the stream."""
    for name in ("residual_multiplier", "attn_out_multiplier"):
        if getattr(block, name, None) is not None:
            return float(getattr(block, name))
    return 1.0


def _clamp(attention: Any) -> float | None:
    """The bound that OLMo, OLMoE and MPT may set to queries, keys and values."""
    config = getattr(attention, "config", None) or getattr(attention, "cfg", None)
    bound = getattr(attention, "clip_qkv", None) or getattr(config, "clip_qkv", None)
    return float(bound) if bound else None


def _folds_value_bias(model: Any, attention: Any, b_O: Tensor | None) -> bool:
    """Whether there is a value bias that is 0 throughout beside an output bias that is not.

    A HookedTransformer has value biases of 0 too where the architecture has none; of these only
    GPT-Neo has an output bias.
    """
    if b_O is None or not b_O.any():
        return False
    if not is_bridge(model):
        original = getattr(model.cfg, "original_architecture", None)
        return original != "GPTNeoForCausalLM" and not attention.b_V.any()
    value = getattr(getattr(attention, "v", None), "original_component", None)
    bias = getattr(value, "bias", None)
    processed = getattr(model, "_weights_processed", False)
    return bool(processed and bias is not None and not bias.any())


def _centred(weight: Float[Tensor, "features d_model"]) -> bool:
    """Whether every row has mean 0, as no trained matrix has."""
    rows = weight.detach().float()
    return bool((rows.mean(dim=1).abs() <= 1e-3 * rows.abs().mean(dim=1)).all())


def require_unfolded(sites: "list[AttentionSite]", *, allow_folded: bool) -> None:
    """Refuses folded value biases unless they are meant.

    Raises:
        InputError: naming the layers and what to do.
    """
    folded = [str(site.index) for site in sites if site.folded]
    if folded and not allow_folded:
        raise InputError(
            f"layers {', '.join(folded)}: the value biases have been folded into the output bias "
            "(compatibility mode, or HookedTransformer.from_pretrained), which leaves the logits "
            "as they are and changes every contribution. Load raw weights with load_model or "
            "wrap_model (from_pretrained_no_processing), or pass allow_folded=True "
            "(--allow-folded) if these are the contributions you want."
        )
