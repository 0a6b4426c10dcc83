"""The one file that knows TransformerLens: where a layer's quantities are, and how to run it.

A TransformerBridge (4.x, 3.9) and a HookedTransformer (3.9) are told apart by what they have.
Hooks are plain torch hooks on the hook points: only they are removed afterwards, whoever else
hooked the model and whatever was raised.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cw_lens.errors import CWLensError

PARTS = ("residual", "value", "pattern", "z", "output")
"""What is read of a layer; the order in which they arrive differs between backends."""


class UnsupportedModelError(CWLensError, RuntimeError):
    """The model's attention is not of the form sum(alpha v) W_O, or cannot be read."""


class _ForwardEnded(Exception):  # noqa: N818 - a signal between two functions of this file
    """Raised by our own hook when nothing after it is needed."""


@dataclass(frozen=True)
class AttentionSite:
    """Where one layer's attention is in a loaded model.

    Attributes:
        index: the layer's number.
        points: for each of `PARTS`, the module whose output it is.
        W_O: output matrix split by head, in the model's dtype, on its device.
        b_O: output bias, or None.
        causal: whether a query sees only itself and earlier keys.
    """

    index: int
    points: Mapping[str, nn.Module]
    W_O: Float[Tensor, "head d_head d_model"]
    b_O: Float[Tensor, " d_model"] | None
    causal: bool

    def shaped(self, part: str, tensor: Tensor) -> Tensor:
        """What the hook point saw, with the axes that cw_lens uses: heads before positions."""
        if part in ("value", "z"):
            d_head = self.W_O.shape[1]
            if tensor.ndim == 4:
                tensor = rearrange(tensor, "batch position head d -> batch position (head d)")
            return rearrange(tensor, "batch position (head d) -> batch head position d", d=d_head)
        return tensor


def is_bridge(model: Any) -> bool:
    """Whether the model is a TransformerBridge over a Hugging Face model."""
    return hasattr(model, "original_model")


def n_layers(model: Any) -> int:
    """Number of blocks in the model."""
    return int(model.cfg.n_layers)


def tokenizer(model: Any) -> Any:
    """The model's tokenizer, or None."""
    return getattr(model, "tokenizer", None)


def context_length(model: Any) -> int | None:
    """Longest sequence that the model takes, or None where it names no limit."""
    length = getattr(model.cfg, "n_ctx", None)
    return None if length is None or length <= 0 else int(length)


def vocabulary_size(model: Any) -> int:
    """Number of token ids that the model can embed."""
    return int(model.cfg.d_vocab)


def input_device(model: Any) -> torch.device:
    """Device on which the model takes its token ids."""
    return next(model.parameters()).device


def byte_alphabet() -> dict[str, int]:
    """The byte behind each character in the pieces of a byte-level tokenizer."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def attention_site(model: Any, layer: int) -> AttentionSite:
    """Where `layer`'s attention is, per architecture.

    Raises:
        UnsupportedModelError: the layer has no such attention, or a norm follows its output.
    """
    block = model.blocks[layer]
    attention = getattr(block, "attn", None)
    if attention is None:
        raise UnsupportedModelError(
            f"layer {layer} has no attention ({type(block).__name__}); leave it out with layers=."
        )
    if getattr(block, "ln1_post", None) is not None:
        raise UnsupportedModelError(
            f"layer {layer}: a norm follows the attention's output matrix, which this version "
            "does not fold into the output matrix yet. Use a model without a post-attention norm."
        )
    hooks = model.hook_dict
    names = {part: name for part, name in cache_names(model, layer).items() if part != "output"}
    missing = [name for name in names.values() if name not in hooks]
    if missing:
        raise UnsupportedModelError(
            f"layer {layer} has no {', '.join(missing)}: TransformerLens does not show this "
            "attention's parts. Load the model with load_model or wrap_model, which force eager "
            "attention."
        )
    points: dict[str, nn.Module] = {part: hooks[name] for part, name in names.items()}
    causal = getattr(model.cfg, "attention_dir", "causal") == "causal"
    projection = getattr(attention, "o", None)
    if projection is None:  # HookedTransformer: the attention module returns the layer's output
        points["output"] = attention
        return AttentionSite(layer, points, attention.W_O, attention.b_O, causal)
    points["output"] = projection.hook_out
    linear = projection.original_component
    # nn.Linear keeps [out, in], GPT-2's Conv1D [in, out]
    weight = linear.weight.T if isinstance(linear, nn.Linear) else linear.weight
    W_O = rearrange(weight, "(head d) model -> head d model", head=model.cfg.n_heads)
    return AttentionSite(layer, points, W_O, linear.bias, causal)


def cache_names(model: Any, layer: int) -> dict[str, str]:
    """The name that an ActivationCache gives each of `PARTS`."""
    prefix = f"blocks.{layer}"
    output = f"{prefix}.attn.o.hook_out" if is_bridge(model) else f"{prefix}.hook_attn_out"
    return {
        "residual": f"{prefix}.hook_resid_pre",
        "value": f"{prefix}.attn.hook_v",
        "pattern": f"{prefix}.attn.hook_pattern",
        "z": f"{prefix}.attn.hook_z",
        "output": output,
    }


@contextmanager
def hooked(hooks: Sequence[tuple[nn.Module, Callable[[Tensor], Tensor | None]]]) -> Iterator[None]:
    """Call each function with its module's output; what it returns, if anything, replaces it."""
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, f=function: f(output))
        for module, function in hooks
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def forward(
    model: Any, ids: Int[Tensor, "batch position"], mask: Bool[Tensor, "batch position"]
) -> Float[Tensor, "batch position vocabulary"]:
    """Logits of one full forward pass, without a key-value cache, padding masked out."""
    options = {"use_cache": False} if is_bridge(model) else {}
    return model(ids, return_type="logits", attention_mask=mask.long(), **options)


def read(
    model: Any,
    ids: Int[Tensor, "batch position"],
    mask: Bool[Tensor, "batch position"],
    sites: Sequence[AttentionSite],
    receive: Callable[[AttentionSite, dict[str, Tensor]], None],
) -> None:
    """One forward pass; each site's parts go to `receive` as soon as its layer has them all.

    Nothing is kept once `receive` returns, and the pass ends with the last site: the logits are
    never computed.

    Raises:
        UnsupportedModelError: a part never arrived.
    """
    arrived: dict[int, dict[str, Tensor]] = {site.index: {} for site in sites}
    done: set[int] = set()

    def arrival(site: AttentionSite, part: str) -> Callable[[Tensor], None]:
        def arrive(tensor: Tensor) -> None:
            if site.index in done:
                return
            parts = arrived[site.index]
            parts[part] = site.shaped(part, tensor)
            if len(parts) == len(PARTS):
                del arrived[site.index]
                done.add(site.index)
                receive(site, parts)
                if not arrived:
                    raise _ForwardEnded

        return arrive

    hooks = [(site.points[part], arrival(site, part)) for site in sites for part in PARTS]
    with torch.no_grad(), hooked(hooks):
        try:
            forward(model, ids, mask)
        except _ForwardEnded:
            return
    for index, parts in arrived.items():
        missing = ", ".join(part for part in PARTS if part not in parts)
        raise UnsupportedModelError(
            f"layer {index}: the forward pass never showed its {missing}. The model does not run "
            "eager attention; load it with load_model or wrap_model."
        )


def z_gradients(
    model: Any,
    ids: Int[Tensor, "batch position"],
    mask: Bool[Tensor, "batch position"],
    sites: Sequence[AttentionSite],
) -> dict[int, Float[Tensor, "batch head query d_head"]]:
    """Gradient of the summed next-token loss with respect to each site's z.

    One forward and one backward pass. The graph starts at the first site and holds no gradient of
    any parameter; autograd frees it layer by layer as it walks back.

    Raises:
        UnsupportedModelError: what is written at a site's z does not reach the loss.
    """
    kept: dict[int, Tensor] = {}

    def keep(site: AttentionSite) -> Callable[[Tensor], Tensor]:
        def replace(z: Tensor) -> Tensor:
            kept[site.index] = z if kept else z.detach().requires_grad_()
            return kept[site.index]

        return replace

    with torch.enable_grad(), _frozen(model), hooked([(s.points["z"], keep(s)) for s in sites]):
        loss = next_token_nll(forward(model, ids, mask), ids, mask).sum()
        try:
            gradients = torch.autograd.grad(loss, [kept[site.index] for site in sites])
        except (KeyError, RuntimeError) as error:
            raise UnsupportedModelError(
                "the loss does not depend on what is written at hook_z of every layer asked for, "
                "so the gradient metric has no meaning here. Use the other metrics."
            ) from error
    return {
        site.index: site.shaped("z", gradient)
        for site, gradient in zip(sites, gradients, strict=True)
    }


def next_token_nll(
    logits: Float[Tensor, "batch position vocabulary"],
    ids: Int[Tensor, "batch position"],
    mask: Bool[Tensor, "batch position"],
) -> Float[Tensor, "batch predicted"]:
    """Loss of each real token given those before it; 0 at padding and at first tokens."""
    logp = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    nll = -logp.gather(2, ids[:, 1:, None].to(logp.device)).squeeze(2)
    return nll.masked_fill(~(mask[:, :-1] & mask[:, 1:]).to(nll.device), 0.0)


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """No parameter asks for a gradient inside; each is as before afterwards."""
    asking = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
