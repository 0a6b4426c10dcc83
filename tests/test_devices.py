"""Devices: the model is never moved, and what is needed of it comes to where the activations are.

A machine may have one device, so a second one is played: tensors that say they are on `meta`,
compute on the CPU, and refuse to meet those of the first.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import cw_lens
from cw_lens.certificates import certified_layer
from cw_lens.scores import layer_scores, resolve_metrics, stacked_scores
from cw_lens.sinks import SINK_DETECTORS
from cw_lens.sites import attention_site
from tests.families import prompts, wrapped

SECOND = torch.device("meta")


class Elsewhere(torch.Tensor):
    """A tensor on the second device."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=SECOND
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("only inside TwoDevices")


class TwoDevices(TorchDispatchMode):
    """Runs operations on the second device; one that meets tensors of both is an error."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        second = any(isinstance(x, Elsewhere) for x in tensors)
        target = kwargs.get("device")
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        elif second and any(type(x) is torch.Tensor and x.ndim for x in tensors):
            raise RuntimeError(f"{function} met tensors on two devices")
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
        result = function(*args, **kwargs)
        if target != SECOND and (target is not None or not second):
            return result
        return tree_map(lambda x: Elsewhere(x) if isinstance(x, torch.Tensor) else x, result)


def parts_of(model, given, index):
    """What the hook points of a layer show, as `AttentionSite.arranged` gives it."""
    from cw_lens import backend

    seen = {}
    site = attention_site(model, index)
    backend.read(model, given, [site], lambda _site, parts: seen.update(parts))
    return site, seen


@pytest.mark.parametrize("name", ["llama_attention_bias", "gemma2", "gpt2"])
@pytest.mark.parametrize("space", ["residual", "attention"])
def test_weights_and_prompts_come_to_the_activations(name, space):
    model = wrapped(name)
    given = prompts(model)
    site, parts = parts_of(model, given, 1)
    functions = resolve_metrics(
        ("contribution", "output_distance", "stream_contribution", "random")
    )
    expected, certificate = certified_layer(site, parts, given, space)
    scores = layer_scores(expected, functions)
    with TwoDevices():
        away = {part: Elsewhere(tensor) for part, tensor in parts.items()}
        layer, there = certified_layer(site, away, given, space)
        assert layer.output.device == layer.W_O.device == layer.mask.device == SECOND
        assert there == certificate
        for metric, found in layer_scores(layer, functions).items():
            torch.testing.assert_close(found.held, scores[metric])
        for detector in SINK_DETECTORS.values():
            assert torch.equal(detector(layer).held, detector(expected))
    assert site.weight.device == torch.device("cpu")


def test_layers_on_several_devices_are_stacked_on_that_of_the_first():
    model = wrapped("llama")
    run = cw_lens.capture(model, prompts(model))
    here = [layer_scores(layer, resolve_metrics("contribution")) for layer in run.layers]
    with TwoDevices():
        away = [here[0], {name: Elsewhere(scores) for name, scores in here[1].items()}]
        together = stacked_scores(away, run.certificates)["contribution"]
    expected = stacked_scores(here, run.certificates)["contribution"]
    assert together.device == torch.device("cpu") and torch.equal(together, expected)


def test_the_second_device_is_strict():
    with TwoDevices(), pytest.raises(RuntimeError, match="two devices"):
        Elsewhere(torch.ones(2)) + torch.ones(2)


def test_reading_and_writing_move_no_parameter():
    model = wrapped("llama")
    given = prompts(model)
    before = {name: (p.device, p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    cw_lens.token_scores(model, given, ["contribution", "gradient"])
    cw_lens.doctor(model)
    after = {name: (p.device, p.dtype, p.data_ptr()) for name, p in model.named_parameters()}
    assert before == after
