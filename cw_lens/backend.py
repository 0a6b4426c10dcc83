"""How to run a loaded model: read what its layers compute, and write into them.

Hooks are plain torch hooks on the hook points: only they are removed afterwards, whoever else
hooked the model and whatever was raised.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from cw_lens.sites import AttentionSite, UnsupportedModelError, is_bridge


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model is given.

    Attributes:
        ids: token ids; padding holds any id.
        mask: True at real tokens.
        pixels: images, where the model reads those; `ids` then only tell images apart.
    """

    ids: Int[Tensor, "batch position"]
    mask: Bool[Tensor, "batch position"]
    pixels: Float[Tensor, "batch channel height width"] | None = field(default=None, kw_only=True)


class _ForwardEnded(Exception):  # noqa: N818 - a signal between two functions of this file
    """Raised by our own hook when nothing after it is needed."""


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


def predicts_next_token(model: Any) -> bool:
    """Whether the logits at a position are of the token after it: a causal language model."""
    if getattr(model, "sees_ahead", False) or _directions(model) == "bidirectional":
        return False
    original = getattr(model, "original_model", None)
    return original is None or bool(getattr(original, "can_generate", lambda: True)())


def _directions(model: Any) -> str:
    config = getattr(getattr(model, "original_model", None), "config", None)
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional"
    return getattr(model.cfg, "attention_dir", "causal")


def main_input(hf_model: Any) -> str:
    """What a Hugging Face model, or TransformerLens' own in its place, takes: ids or pixels."""
    return getattr(hf_model, "main_input_name", "input_ids")


def reads_images(model: Any) -> bool:
    """Whether the model takes images instead of token ids."""
    return is_bridge(model) and main_input(model.original_model) == "pixel_values"


def image_shape(config: Any) -> tuple[int, int, int, int]:
    """Channels, height, width and patch size of the images that a vision model reads.

    Args:
        config: Hugging Face's, of the model.
    """
    size, patch = config.image_size, config.patch_size
    height, width = (size, size) if isinstance(size, int) else size
    return config.num_channels, height, width, patch if isinstance(patch, int) else patch[0]


def short_inputs(model: Any, length: int = 8) -> Inputs:
    """A small input to try the model on: the first ids of its vocabulary, or noise."""
    device = input_device(model)
    if reads_images(model):
        channels, height, width, _ = image_shape(model.original_model.config)
        noise = torch.randn(1, channels, height, width, generator=torch.Generator().manual_seed(0))
        pixels = noise.to(device, next(model.parameters()).dtype)
        positions = image_positions(model, pixels)
        ids = torch.arange(positions, device=device)[None]
        return Inputs(ids, torch.ones_like(ids, dtype=torch.bool), pixels=pixels)
    context = context_length(model) or length
    ids = torch.arange(min(length, vocabulary_size(model), context), device=device)[None]
    return Inputs(ids, torch.ones_like(ids, dtype=torch.bool))


def image_positions(model: Any, pixels: Float[Tensor, "batch channel height width"]) -> int:
    """Number of positions that these images take in the residual stream, patches and more."""
    seen = []

    def stop(residual: Tensor) -> None:
        seen.append(residual.shape[1])
        raise _ForwardEnded

    ids = torch.zeros(len(pixels), 1, dtype=torch.long)
    inputs = Inputs(ids, ids == 0, pixels=pixels)
    with torch.no_grad(), hooked([(model.hook_dict["blocks.0.hook_resid_pre"], stop)]):
        try:
            forward(model, inputs)
        except _ForwardEnded:
            return seen[0]
    raise UnsupportedModelError(
        "layer 0: the forward pass never showed hook_resid_pre, so the positions of an image are "
        "not known. Load the model with load_model or wrap_model."
    )


def forward(model: Any, inputs: Inputs) -> Tensor:
    """Logits of one full forward pass, without a key-value cache, padding masked out."""
    if inputs.pixels is not None:
        return model(inputs.pixels, return_type="logits")
    options = {"use_cache": False} if is_bridge(model) else {}
    return model(inputs.ids, return_type="logits", attention_mask=inputs.mask.long(), **options)


def read(
    model: Any,
    inputs: Inputs,
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
            seen = arrived[site.index]
            seen[part] = tensor
            if len(seen) == len(site.points):
                del arrived[site.index]
                done.add(site.index)
                receive(site, site.arranged(seen))
                if not arrived:
                    raise _ForwardEnded

        return arrive

    hooks = [(point, arrival(site, part)) for site in sites for part, point in site.points.items()]
    with torch.no_grad(), hooked(hooks):
        try:
            forward(model, inputs)
        except _ForwardEnded:
            return
    for site in sites:
        missing = ", ".join(part for part in site.points if part not in arrived[site.index])
        raise UnsupportedModelError(
            f"layer {site.index}: the forward pass never showed its {missing}. The model does not "
            "run eager attention, or its processed weights bypass it; load it with load_model or "
            "wrap_model."
        )


def z_gradients(model: Any, inputs: Inputs, sites: Sequence[AttentionSite]) -> dict[int, Tensor]:
    """Gradient of the summed next-token loss with respect to each site's z, as it is hooked.

    One forward and one backward pass. The graph starts at the first site and holds no gradient of
    any parameter; autograd frees it layer by layer as it walks back.

    Raises:
        UnsupportedModelError: the model has no next-token loss, or what is written at a site's z
            does not reach it.
    """
    kept: dict[int, Tensor] = {}

    def keep(site: AttentionSite) -> Callable[[Tensor], Tensor]:
        def replace(z: Tensor) -> Tensor:
            kept[site.index] = z if kept else z.detach().requires_grad_()
            return kept[site.index]

        return replace

    with torch.enable_grad(), _frozen(model), hooked([(s.points["z"], keep(s)) for s in sites]):
        loss = next_token_nll(model, inputs).sum()
        try:
            gradients = torch.autograd.grad(loss, [kept[site.index] for site in sites])
        except (KeyError, RuntimeError) as error:
            raise UnsupportedModelError(
                "the loss does not depend on what is written at hook_z of every layer asked for, "
                "so the gradient metric has no meaning here. Use the other metrics."
            ) from error
    return {site.index: gradient for site, gradient in zip(sites, gradients, strict=True)}


def next_token_nll(model: Any, inputs: Inputs) -> Float[Tensor, "batch predicted"]:
    """Loss of each real token given those before it; 0 at padding and at first tokens.

    Raises:
        UnsupportedModelError: the model does not predict the next token.
    """
    if not predicts_next_token(model):
        raise UnsupportedModelError(
            "the model does not predict the next token from those before it, so there is no loss "
            "for the gradient metric or a perplexity. Use the other metrics."
        )
    logits, ids, mask = forward(model, inputs), inputs.ids, inputs.mask
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
