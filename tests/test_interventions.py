"""Writes: what they refuse, and that nothing of them stays. tests/test_families.py has the laws."""

import pytest
import torch

import cw_lens
from cw_lens import backend
from cw_lens.edits import InterventionError, write_routes
from cw_lens.errors import InputError
from cw_lens.prompts import prompts_from_ids
from cw_lens.sites import UnsupportedModelError, attention_layers
from tests import oracles
from tests.families import prompts, wrapped


def marked(*places, batch=2, heads=4, keys=9):
    mask = torch.zeros(batch, heads, keys, dtype=torch.bool)
    for place in places:
        mask[place] = True
    return mask


def count_hooks(model):
    return sum(len(module._forward_hooks) for module in model.modules())


def run(model, given):
    with torch.no_grad():
        return backend.forward(model, given)


def test_nothing_stays_behind_also_after_an_exception(llama):
    given = prompts(llama)
    before, clean = count_hooks(llama), run(llama, given)
    with cw_lens.masked_values(llama, {0: marked((0, 1, 2))}):
        assert not torch.equal(run(llama, given), clean)
    with pytest.raises(KeyError, match="mine"):
        with cw_lens.masked_values(llama, {0: marked((0, 1, 2))}):
            run(llama, given)
            raise KeyError("mine")
    assert count_hooks(llama) == before
    assert torch.equal(run(llama, given), clean)
    with cw_lens.scaled_values(llama, 0.5, {0: marked((0, 1, 2))}):  # no factor of before counts
        once = run(llama, given)
    layer = cw_lens.capture(llama, given, layers=[0]).layers[0]
    assert not torch.equal(once, clean)
    assert layer.pattern[0, 1, 2:, 2].min() > 0


def test_a_mask_of_one_example_serves_every_example(llama):
    given = prompts(llama)
    with cw_lens.masked_values(llama, {1: marked((0, 1, 2), batch=1)}):
        one = run(llama, given)
    with cw_lens.masked_values(llama, {1: marked((0, 1, 2), (1, 1, 2))}):
        each = run(llama, given)
    assert torch.equal(one[given.mask], each[given.mask])


def test_several_layers_at_once_equal_contexts_inside_each_other(llama):
    given = prompts(llama)
    first, second = {0: marked((0, 1, 2))}, {1: marked((1, 3, 0))}
    with cw_lens.masked_values(llama, first | second):
        together = run(llama, given)
    with cw_lens.masked_values(llama, first), cw_lens.masked_values(llama, second):
        nested = run(llama, given)
    assert torch.equal(together[given.mask], nested[given.mask])


def test_capture_inside_reads_the_model_as_it_then_is(llama):
    given = prompts(llama)
    clean = cw_lens.capture(llama, given).layers
    with cw_lens.masked_values(llama, {0: marked((0, 1, 2))}):
        layers = cw_lens.capture(llama, given, layers=[1]).layers
    assert not torch.equal(layers[0].residual[0], clean[1].residual[0])
    assert torch.equal(layers[0].residual[1], clean[1].residual[1])


@pytest.mark.parametrize("name", ["llama", "gptj", "bert"])  # one for each route
def test_an_intervention_that_changes_nothing_is_an_error(name):
    model = wrapped(name)
    given = prompts_from_ids(model, [[4, 5, 6], [4, 5]])
    message = "layer 0: changing values changed nothing, because the model was not run.* Run the"
    with pytest.raises(InterventionError, match=message):
        with cw_lens.masked_values(model, {0: marked((0, 1, 2), keys=3)}):
            pass
    padding = marked((0, 1, 1), (1, 1, 2), keys=3)
    message = "layer 1: changing .* no value marked in example 1 has any weight. Mark real keys"
    with pytest.raises(InterventionError, match=message):
        with cw_lens.masked_values(model, {0: marked((0, 1, 0), keys=3), 1: padding}):
            run(model, given)


@pytest.mark.parametrize("name", ["llama", "gptj", "bert", "gemma2", "gemma4_text", "jamba"])
@pytest.mark.parametrize("space", ["residual", "attention"])
def test_a_layer_written_into_is_read_as_it_was_written(name, space):
    """Whatever the route: the masked edge gives nothing, and the identities hold."""
    model = wrapped(name)
    given = prompts(model)
    index = attention_layers(model)[-1]
    clean = cw_lens.capture(model, given, layers=[index], space=space).layers[0]
    where = {index: marked((0, 1, 2), (1, 2, 0))}
    with cw_lens.masked_values(model, where):
        run_inside = cw_lens.capture(model, given, layers=[index], space=space)
    layer = run_inside.layers[0]
    assert torch.equal(layer.pattern, clean.pattern)
    written = oracles.written(clean)
    written[0, 1, :, 2] = 0
    written[1, 2, :, 0] = 0
    torch.testing.assert_close(layer.output.double(), written.sum(dim=(1, 3)), atol=1e-4, rtol=1e-4)
    shares = cw_lens.inter_head_contributions(layer)
    assert not shares[0, 1, :, 2].any() and not shares[1, 2, :, 0].any()
    assert shares[0, 1, :, 3].any()


def test_contexts_may_close_in_any_order(llama):
    given, where = prompts(llama), {0: marked((0, 1, 2), (1, 1, 2))}
    with cw_lens.scaled_values(llama, 0.25, where):
        expected = run(llama, given)
    first, second = (cw_lens.scaled_values(llama, f, where) for f in (0.5, 0.25))
    first.__enter__()
    second.__enter__()
    run(llama, given)
    first.__exit__(None, None, None)
    assert torch.equal(run(llama, given), expected)
    second.__exit__(None, None, None)


def test_layers_count_from_the_end(llama):
    given, mask = prompts(llama), marked((0, 1, 2))
    with cw_lens.masked_values(llama, {-1: mask}):
        last = run(llama, given)
    with cw_lens.masked_values(llama, {1: mask}):
        assert torch.equal(run(llama, given)[given.mask], last[given.mask])


@pytest.mark.parametrize("shape", [(3, 4, 9), (2, 2, 9), (2, 4, 8)])
@pytest.mark.parametrize("name", ["llama", "gptj", "bert"])
def test_a_mask_of_another_shape_is_refused(name, shape):
    model = wrapped(name)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(InputError, match=r"layer 0: the mask has shape .*\(2, 4, 9\) \(batch, hea"):
        with cw_lens.masked_values(model, {0: mask}):
            run(model, prompts(model))


def test_a_layer_without_attention_is_refused():
    model = wrapped("jamba")
    for layer in (0, 7, -2, True):
        with pytest.raises(InputError, match=rf"layer {layer} has no attention .* have are 1\."):
            with cw_lens.masked_values(model, {layer: marked((0, 0, 0))}):
                pass


def test_routes_are_found_beside_open_writes(llama):
    with cw_lens.masked_values(llama, {0: marked((0, 1, 2))}):
        assert write_routes(llama, [0, 1]) == {0: "z", 1: "z"}
        run(llama, prompts(llama))


@pytest.mark.parametrize("name", ["llama", "gptj", "bert", "gemma2"])
def test_a_value_replaced_writes_what_the_new_one_would(name):
    """One query head and key: the output changes by alpha (new - v) W_O, the rest stays."""
    model = wrapped(name)
    given = prompts(model)
    index = attention_layers(model)[-1]
    layer = cw_lens.capture(model, given, layers=[index], space="attention").layers[0]
    mask, new = marked((1, 2, 3)), torch.zeros_like(layer.value)
    new[1, 2, 3] = torch.arange(layer.value.shape[-1], dtype=torch.float32)
    with cw_lens.replaced_values(model, {index: mask}, {index: new}):
        changed = cw_lens.capture(model, given, layers=[index], space="attention").layers[0]
    difference = (new - layer.value)[1, 2, 3] @ layer.W_O[2]
    expected = layer.output.clone()
    expected[1] += layer.pattern[1, 2, :, 3, None] * difference
    torch.testing.assert_close(changed.output, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(changed.output[0], layer.output[0])
    with cw_lens.replaced_values(model, {index: mask}, {index: torch.zeros_like(new[:1])}):
        nothing = run(model, given)
    with cw_lens.masked_values(model, {index: mask}):
        masked = run(model, given)
    torch.testing.assert_close(nothing[1], masked[1], atol=1e-5, rtol=1e-5)


def test_the_last_replacement_of_a_value_stands(llama):
    given, mask = prompts(llama), {0: marked((0, 1, 2))}
    layer = cw_lens.capture(llama, given, layers=[0]).layers[0]
    first, second = torch.ones_like(layer.value), torch.full_like(layer.value, -2.0)
    with cw_lens.replaced_values(llama, mask, {0: second}):
        alone = run(llama, given)
    with cw_lens.replaced_values(llama, mask, {0: first}):
        with cw_lens.replaced_values(llama, mask, {0: second}):
            nested = run(llama, given)
    torch.testing.assert_close(nested[0], alone[0], atol=1e-5, rtol=1e-5)


def test_replacements_that_do_not_fit_are_refused(llama):
    given, mask = prompts(llama), {0: marked((0, 1, 2))}
    value = torch.zeros(2, 4, 9, 8)
    broken = value.clone()
    broken[0, 1, 2, 0] = torch.nan
    for values, message in (
        ({}, "layer 0 has marked values and no values to put there"),
        ({0: value[:, :3]}, r"layer 0: the new values have shape \(2, 3, 9, 8\), the mask"),
        ({0: broken}, "layer 0: the new values hold NaN or infinity where marked"),
    ):
        with pytest.raises(InputError, match=message):
            with cw_lens.replaced_values(llama, mask, values):
                pass
    with pytest.raises(InputError, match="new values for 4 examples and a mask of 2"):
        with cw_lens.replaced_values(llama, mask, {0: value.repeat(2, 1, 1, 1)}):
            pass
    for values, one in ((value[..., :5], mask), (value.repeat(2, 1, 1, 1), {0: mask[0][:1]})):
        with pytest.raises(InputError, match=r"layer 0: the new values .* batch 2 and d_head 8"):
            with cw_lens.replaced_values(llama, one, {0: values}):
                run(llama, given)


@pytest.mark.parametrize("name", ["llama", "gptj", "bert"])  # one for each route
def test_the_first_position_is_the_one_marked_in_masks(name):
    model = wrapped(name)
    given = prompts(model)
    places = [(example, head, 0) for example in range(2) for head in range(4)]
    with cw_lens.scaled_values(model, 0.25, {i: marked(*places) for i in (0, 1)}):
        expected = run(model, given)
    with cw_lens.scaled_values(model, 0.25, positions="first", prompts=given):
        assert torch.equal(run(model, given), expected)
    with cw_lens.scaled_values(model, 0.25, positions="first"):
        assert torch.equal(run(model, given), expected)
    with cw_lens.scaled_values(model, 0.25, {1: marked(*places)}):
        last = run(model, given)
    with cw_lens.scaled_values(model, 0.25, positions="first", layers=[-1]):
        assert torch.equal(run(model, given), last)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gptj"])
@pytest.mark.parametrize("positions", ["sink", "centred_cosine", "received_attention"])
def test_sinks_are_those_of_the_very_pass(name, side, positions):
    """Explicit masks of what the detector marks inside, layer by layer, change as much."""
    model = wrapped(name)
    rows = [[5, 9, 5, 7, 11, 5, 30], [8, 8, 40, 41, 8]]  # a token again: a sink again
    given = prompts_from_ids(model, rows, padding_side=side)
    options = {"positions": positions, "prompts": given}
    with cw_lens.scaled_values(model, 0.0, **options):
        found = run(model, given)
        detector = "cosine" if positions == "sink" else positions
        sinks = cw_lens.find_sinks(model, given, detector)
    if positions == "sink":
        assert sinks[:, 0].sum() == 4 * (3 + 3)
    with cw_lens.scaled_values(model, 0.0, {i: sinks[:, i] for i in (0, 1)}):
        expected = run(model, given)
    assert torch.equal(found[given.mask], expected[given.mask])
    assert not torch.equal(found[given.mask], run(model, given)[given.mask])


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_first_position_is_that_of_the_first_real_token(llama, side):
    given = prompts(llama, (9, 6), side)
    alone = prompts_from_ids(llama, [given.ids[1][given.mask[1]].tolist()])
    with cw_lens.scaled_values(llama, 0.0, positions="first", prompts=given):
        together = run(llama, given)[1][given.mask[1]]
    with cw_lens.scaled_values(llama, 0.0, positions="first"):
        torch.testing.assert_close(together, run(llama, alone)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("positions", ["first", "sink", "value_cosine"])
def test_positions_times_1_are_the_clean_run_bit_for_bit(llama, positions):
    given = prompts(llama)
    clean, before = run(llama, given), count_hooks(llama)
    with cw_lens.scaled_values(llama, 1.0, positions=positions, prompts=given):
        assert count_hooks(llama) > before
        assert torch.equal(run(llama, given), clean)
    with pytest.raises(KeyError, match="mine"):
        with cw_lens.scaled_values(llama, 0.5, positions=positions, prompts=given):
            assert not torch.equal(run(llama, given), clean)
            raise KeyError("mine")
    assert count_hooks(llama) == before
    assert torch.equal(run(llama, given), clean)


def test_positions_that_make_no_sense_are_refused(llama):
    given, mask = prompts(llama), {0: marked((0, 1, 2))}
    for options, message in (
        ({}, "give where, masks by layer, or positions, such as"),
        ({"where": mask, "positions": "first"}, "give where, masks by layer, or positions"),
        ({"where": mask, "layers": [0]}, "layers and prompts go with positions; where names"),
        ({"where": mask, "prompts": given}, "layers and prompts go with positions; where names"),
        ({"positions": "bos"}, "unknown positions 'bos'; there are sink, cosine, .* first."),
        ({"positions": "first", "layers": [7]}, "layer 7 does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            with cw_lens.scaled_values(llama, 0.5, **options):
                pass
    with pytest.raises(
        InputError, match=r"of shape \(2, 9\) .* other token ids, of shape \(1, 5\)"
    ):
        with cw_lens.scaled_values(llama, 0.5, positions="sink", prompts=given):
            run(llama, prompts(llama, (5,)))


def test_sinks_cannot_be_found_where_the_pattern_shows_too_late():
    model = wrapped("bert")
    message = 'before the pattern shows, so no sink can be found .* Use positions="first"'
    with pytest.raises(UnsupportedModelError, match=message):
        with cw_lens.scaled_values(model, 0.5, positions="sink"):
            pass
