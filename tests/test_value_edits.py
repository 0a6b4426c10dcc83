"""Edits of the sink's value: literal oracles in d_model, and the laws of a batch of edits."""

from itertools import product

import pytest
import torch

import cw_lens
from cw_lens import backend
from cw_lens.edits import InterventionError
from cw_lens.errors import InputError
from cw_lens.interventions import edited_rows, edited_values
from cw_lens.prompts import one_by_one, prompts_from_ids, repeated
from cw_lens.value_edits import KINDS, SURGERY, EditPlan, ValueEdit
from tests.families import prompts, wrapped

ROWS = [[5, 9, 5, 7, 11, 5, 30, 12], [8, 40, 41, 8, 22]]  # a token again is a sink again


def run(model, given):
    with torch.no_grad():
        return backend.forward(model, given)


def given_to(model, side="right"):
    return prompts_from_ids(model, ROWS, padding_side=side)


def first_marks(given):
    first = torch.arange(given.ids.shape[1]) == given.first[:, None]
    return first[:, None].expand(-1, 4, -1).contiguous()


def literal(vector, mean, kind):
    """What becomes of one projected value, in d_model: mean is that of the projected others."""
    along = (vector @ mean) / (mean @ mean) * mean
    return {
        "scale": vector,
        "mean": mean,
        "keep_parallel": along,
        "keep_orthogonal": vector - along,
        "flip_parallel": vector - 2 * along,
    }[kind]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gptj"])  # grouped values, a norm behind W_O
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "random"])
@pytest.mark.parametrize("target", ["first", "sinks", 3])
def test_each_kind_writes_what_the_literal_formula_says(name, kind, target):
    """Layer 1, whose values layer 0's edits have already changed; every query, in d_model."""
    model = wrapped(name)
    given = given_to(model)
    plan = EditPlan(given, [ValueEdit(kind, 0.7, target)])
    with edited_values(model, EditPlan(given, plan.edits, [0])):
        before = cw_lens.capture(model, given, layers=[1]).layers[0]
        sinks = cw_lens.find_sinks(model, given, layers=[1])[:, 0]
        run(model, given)
    with edited_values(model, plan):
        after = cw_lens.capture(model, given, layers=[1]).layers[0]
        run(model, given)
    expected = before.output.double().clone()
    for example, head in product(range(2), range(4)):
        length = len(ROWS[example])
        projected = before.value[example, head].double() @ before.W_O[head].double()
        marks = sinks[example, head, :length].tolist()
        others = [projected[k] for k in range(1, length) if not marks[k]]
        mean = torch.stack(others).mean(dim=0)
        places = {"first": [0], "sinks": [k for k in range(length) if marks[k]]}.get(target, [3])
        for key in places:
            change = 0.7 * literal(projected[key], mean, kind) - projected[key]
            weight = before.pattern[example, head, :, key].double()
            expected[example] += weight[:, None] * change
    assert torch.equal(before.pattern, after.pattern)
    assert not torch.allclose(before.output.double(), expected, atol=1e-3)
    torch.testing.assert_close(after.output.double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_random_vector_is_as_long_as_the_value_and_points_anywhere(name):
    model = wrapped(name)
    given = repeated(given_to(model), 4)
    edits = [ValueEdit("random", 1.0, "sinks", seed=row // 2) for row in range(6)]
    edits += [ValueEdit("random", -0.5, "first", seed=0)] * 2
    clean = cw_lens.capture(model, given, layers=[0]).layers[0]
    with edited_values(model, EditPlan(given, edits, [0])):
        layer = cw_lens.capture(model, given, layers=[0]).layers[0]
        run(model, given)
    drawn, own = (torch.einsum("bhd,hdm->bhm", x.value[:, :, 0], x.W_O) for x in (layer, clean))
    size = own.norm(dim=-1)
    torch.testing.assert_close(drawn[:6].norm(dim=-1), size[:6])
    torch.testing.assert_close(drawn[6:].norm(dim=-1), 0.5 * size[6:])
    torch.testing.assert_close(drawn[6:], -0.5 * drawn[:2])
    cosine = torch.cosine_similarity(drawn[:6, :, None], drawn[:6, None], dim=-1)
    assert cosine[:, *torch.triu_indices(4, 4, 1)].abs().max() < 0.99  # heads differ
    # so do texts and seeds, keys that are both sinks, and layers
    others = [
        drawn[1],
        drawn[2],
        drawn[4],
        torch.einsum("hd,hdm->hm", layer.value[0, :, 2], layer.W_O),
    ]
    assert torch.cosine_similarity(drawn[0], torch.stack(others), dim=-1).abs().max() < 0.99
    directions = []
    for index in (0, 1):
        plan = EditPlan(given, [ValueEdit("random")], [index])
        with edited_values(model, plan):
            value = cw_lens.capture(model, given, layers=[index]).layers[0].value[0, :, 0]
            run(model, given)
        directions.append(value / value.norm(dim=-1, keepdim=True))
    assert (directions[0] * directions[1]).sum(dim=-1).abs().max() < 0.99
    torch.testing.assert_close(layer.value[:, :, 1], clean.value[:, :, 1])


def test_random_directions_are_isotropic_and_fixed_by_their_state():
    value, gram = torch.ones(2, 4000, 3), torch.eye(3).expand(2, 3, 3)
    state = torch.arange(4000) * 7919
    drawn = cw_lens.value_edits.random_as_long(value, gram, state)
    torch.testing.assert_close(drawn.norm(dim=-1), value.norm(dim=-1))
    spread = torch.einsum("hkd,hke->de", drawn, drawn) / 8000
    torch.testing.assert_close(spread, torch.eye(3), atol=0.06, rtol=0)
    assert drawn.mean(dim=(0, 1)).abs().max() < 0.04
    part = cw_lens.value_edits.random_as_long(value[:, :7], gram, state[:7])
    assert torch.equal(part, drawn[:, :7])


def test_the_two_parts_are_the_value_and_orthogonal_in_the_stream():
    generator = torch.Generator().manual_seed(0)
    W_O = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64)
    value, mean = torch.randn(3, 6, 5, generator=generator).double(), torch.ones(3, 5).double()
    gram = W_O @ W_O.mT
    parallel = cw_lens.value_edits.parallel_part(value, mean, gram)
    direction = (mean[:, None] @ W_O).squeeze(1)
    inner = torch.einsum("hkd,hdm,hm->hk", value - parallel, W_O, direction)
    assert inner.abs().max() < 1e-11
    unit = direction / direction.norm(dim=-1, keepdim=True)
    along = torch.einsum("hkd,hdm,hm->hk", value, W_O, unit)
    expected = along[..., None] * unit[:, None]
    torch.testing.assert_close(torch.einsum("hkd,hdm->hkm", parallel, W_O), expected)


def test_the_parts_a_layer_keeps_add_up(llama):
    """Output with the one part and with the other: the clean one and that without the value."""
    given = repeated(given_to(llama), 4)
    kinds = [("keep_parallel", 1.0), ("keep_orthogonal", 1.0), ("scale", 1.0), ("scale", 0.0)]
    edits = [ValueEdit(kind, factor) for kind, factor in kinds for _ in ROWS]
    with edited_values(llama, EditPlan(given, edits, [0])):
        output = cw_lens.capture(llama, given, layers=[0]).layers[0].output.unflatten(0, (4, 2))
        run(llama, given)
    torch.testing.assert_close(output[0] + output[1], output[2] + output[3], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(output[0], output[3], atol=1e-2)


def test_a_value_orthogonal_to_the_mean_has_no_part_along_it(llama):
    """Planted: the first token's value is made orthogonal; keeping its parallel part removes it."""
    given = given_to(llama)
    layer = cw_lens.capture(llama, given, layers=[0]).layers[0]
    sinks = cw_lens.find_sinks(llama, given, layers=[0])[:, 0]
    others = (given.mask[:, None] & ~sinks)[..., None]
    mean = (layer.value * others).sum(dim=2) / others.sum(dim=2)
    pulled = torch.einsum("bhd,hde->bhe", mean, layer.gram)
    share = (layer.value[:, :, 0] * pulled).sum(-1) / (mean * pulled).sum(-1)
    planted = torch.zeros_like(layer.value)
    planted[:, :, 0] = layer.value[:, :, 0] - share[..., None] * mean
    where = {0: first_marks(given)}
    logits = {}
    for kind, factor in (
        ("keep_parallel", 1.0),
        ("scale", 0.0),
        ("keep_orthogonal", 1.0),
        ("scale", 1.0),
    ):
        plan = EditPlan(given, [ValueEdit(kind, factor)], [0])
        with cw_lens.replaced_values(llama, where, {0: planted}), edited_values(llama, plan):
            logits[kind, factor] = run(llama, given)[given.mask]
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(logits["keep_parallel", 1.0], logits["scale", 0.0], **close)
    torch.testing.assert_close(logits["keep_orthogonal", 1.0], logits["scale", 1.0], **close)
    assert not torch.allclose(logits["scale", 0.0], logits["scale", 1.0], atol=1e-2)


@pytest.mark.parametrize("target", ["first", "sinks", 2])
def test_a_row_scaled_by_1_is_clean_bit_for_bit_beside_others(llama, target):
    given = repeated(given_to(llama), 3)
    still = [ValueEdit("scale", 1.0, target)] * 2
    moved = [ValueEdit(kind) for kind in ("random", "flip_parallel", "mean", "keep_parallel")]
    clean = run(llama, given)
    plan = EditPlan(given, still + moved, detector="centred_cosine")  # leaves others at layer 1
    with edited_rows(llama, plan) as done:
        found = run(llama, given)
    assert torch.equal(found[:2], clean[:2])
    assert not (found[2:] == clean[2:]).all(dim=-1)[given.mask[2:]].any()
    assert [done.changed[row] for row in range(6)] == [0, 0, 8, 8, 8, 8]


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_the_first_value_times_0_is_masked(name):
    model = wrapped(name)
    given = given_to(model)
    with edited_values(model, EditPlan(given, [ValueEdit("scale", 0.0)])):
        found = run(model, given)
    with cw_lens.masked_values(model, {i: first_marks(given) for i in (0, 1)}):
        assert torch.equal(found, run(model, given))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_edits_equals_one_run_each(llama, side):
    """Padding, other texts and other edits beside a row change nothing of it."""
    edits = [
        ValueEdit(kind, factor, target, seed)
        for kind, factor, seed in (*((k, 1.0, 4) for k in KINDS), ("scale", 2.5, 0))
        for target in ("first", "sinks", 2)
    ]
    given = repeated(given_to(llama, side), len(edits))
    paired = [edit for edit in edits for _ in ROWS]
    few = {"detector": "centred_cosine"}
    with edited_rows(llama, EditPlan(given, paired, **few)) as done:
        together = run(llama, given)
    assert not done.lacking
    for row, (edit, alone) in enumerate(zip(paired, one_by_one(given), strict=True)):
        with edited_values(llama, EditPlan(alone, [edit], **few)):
            single = run(llama, alone)[0]
        torch.testing.assert_close(together[row][given.mask[row]], single, rtol=1e-4, atol=2e-5)


def test_rows_without_a_mean_are_told(llama):
    """All tokens alike are all sinks: no mean of others; the value stays, and that is an error."""
    given = prompts_from_ids(llama, [[5, 9, 7], [6, 6, 6]])
    plan = EditPlan(given, [ValueEdit("keep_parallel")], [0])
    message = "layer 0, example 1: no token beside the first and the sinks .* Take longer texts"
    with pytest.raises(InterventionError, match=message):
        with edited_values(llama, plan):
            run(llama, given)
    clean = run(llama, given)
    with edited_rows(llama, plan) as done:
        found = run(llama, given)
    assert done.lacking == {1: 0} and done.changed[0] == 4 and done.changed[1] == 0
    assert torch.equal(found[1], clean[1]) and not torch.equal(found[0], clean[0])


def test_other_detectors_leave_other_values_out_of_the_mean(llama):
    given = given_to(llama)
    logits = []
    for detector in ("cosine", "first"):
        plan = EditPlan(given, [ValueEdit("mean")], [0], detector)
        with edited_values(llama, plan):
            logits.append(run(llama, given))
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "rotate"}, "unknown kind of edit 'rotate'; there are scale, random, keep_par"),
        ({"factor": float("inf")}, "the factor is inf; it must be a finite number"),
        ({"target": "last"}, "unknown target 'last'; there are first, sinks, control and the num"),
        ({"target": -1}, "unknown target -1"),
        ({"seed": -1}, "the seed is -1; it must be a whole number from 0"),
    ],
)
def test_edits_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ValueEdit(**options)


def test_plans_that_make_no_sense_are_refused(llama):
    given = given_to(llama)
    for options, message in (
        ({"detector": "bos"}, "unknown detector 'bos'; there are cosine"),
        ({"edits": []}, "there are 0 edits for 2 prompts. Give one for each, or one for all"),
        ({"edits": [ValueEdit()] * 3}, "there are 3 edits for 2 prompts"),
        ({"edits": [ValueEdit()] * 2, "prompts": None}, "there are 2 edits for no prompts"),
        ({"edits": [ValueEdit(target="control")]}, "the control token is not drawn yet; give its"),
        ({"edits": [ValueEdit("random")], "prompts": None}, "a random vector is fixed by its pro"),
    ):
        with pytest.raises(InputError, match=message):
            EditPlan(**{"prompts": given, "edits": [ValueEdit()], **options})
    with pytest.raises(InputError, match=r"example 1 has 5 tokens, .* there is no token 6\."):
        with edited_values(llama, EditPlan(given, [ValueEdit("mean", target=6)])):
            run(llama, given)
    with pytest.raises(InputError, match="unknown space 'outer'"):
        with edited_values(llama, EditPlan(given, [ValueEdit("mean")], space="outer")):
            pass
    with pytest.raises(InputError, match=r"layer 0: the plan is for .* \(2, 8\), the run has \(1"):
        with edited_values(llama, EditPlan(given, [ValueEdit("mean")])), torch.no_grad():
            embedded = llama.original_model.get_input_embeddings()(torch.arange(5)[None])
            llama.original_model(inputs_embeds=embedded)


def test_means_cannot_be_taken_where_the_pattern_shows_too_late():
    model = wrapped("bert")
    given = prompts(model)
    with pytest.raises(cw_lens.sites.UnsupportedModelError, match="before the pattern shows"):
        with edited_values(model, EditPlan(given, [ValueEdit("mean")])):
            pass
    with edited_values(model, EditPlan(given, [ValueEdit("scale", 0.0, 2)])):
        found = run(model, given)
    mask = torch.zeros(2, 4, 9, dtype=torch.bool)
    mask[:, :, 2] = True
    with cw_lens.masked_values(model, {0: mask, 1: mask}):
        assert torch.equal(found, run(model, given))


def test_nothing_of_an_edit_stays_behind(llama):
    given = given_to(llama)
    clean = run(llama, given)
    for kind in SURGERY:
        with pytest.raises(KeyError, match="mine"):
            with edited_values(llama, EditPlan(given, [ValueEdit(kind)])):
                assert not torch.equal(run(llama, given), clean)
                raise KeyError("mine")
        assert torch.equal(run(llama, given), clean)
