"""Random numbers that depend on what they are for, not on the order they are drawn in.

A hash of (seed, prompt, layer, head, key) gives a value the same number whether its example runs
alone, in a padded batch or in blocks of queries, on any device.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def prompt_digest(
    ids: Int[Tensor, "batch position"], mask: Bool[Tensor, "batch position"]
) -> Int[Tensor, " batch"]:
    """A number for each example's real tokens and their order, the same under any padding."""
    place = mask.long().cumsum(dim=1)
    return mixed(mixed(ids.long()) + place).masked_fill(~mask, 0).sum(dim=1)


def mixed(state: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """splitmix64 (Steele, Lea and Flood 2014) of int64, whose products wrap as unsigned ones do."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def uniform(state: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Uniform in [0, 1) from the upper 24 bits, all that a float32 holds."""
    return _shifted(state, 40).to(torch.float32) / (1 << 24)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shifted(state: Int[Tensor, "*shape"], bits: int) -> Int[Tensor, "*shape"]:
    """Right shift that fills with zeros, as of an unsigned number."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
