"""The explain page without a browser: packing, budget, sentences, escaping."""

import base64
import gzip
import html
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from cw_lens.errors import InputError
from cw_lens.geometry import decompose, inter_head_contributions, intra_head_contributions
from cw_lens.views import explain_page
from cw_lens.views.budget import FEWEST_HEADS, ranges, select
from cw_lens.views.page import Page
from cw_lens.views.payload import STEPS, packed, script_json
from cw_lens.views.show import NO_LAYER_SCORES
from cw_lens.views.words import percent
from tests.explanations import HOSTILE, made_up_explanation

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def data_of(page: Page) -> dict:
    return json.loads(DATA.search(page.html)[1])


def prompt_of(page: Page) -> dict:
    return data_of(page)["prompts"][0]


def unpacked(numbers: dict) -> np.ndarray:
    if "float32" in numbers:
        return np.frombuffer(base64.b64decode(numbers["float32"]), "<f4")
    return np.frombuffer(base64.b64decode(numbers["int16"]), "<i2") * numbers["unit"]


def words(count: int) -> tuple[str, ...]:
    return tuple(f"·t{i}" for i in range(count))


@pytest.fixture(scope="module")
def hostile() -> Page:
    return explain_page(made_up_explanation(), recipe="cw-lens explain --text '</script><b>'")


@pytest.mark.parametrize(("causal", "gated"), [(True, False), (False, False), (True, True)])
def test_edges_come_back_within_half_a_unit(causal, gated):
    explanation = made_up_explanation(words(9), causal=causal, gated=gated)
    held = prompt_of(explain_page(explanation))["layers"]
    assert [layer["index"] for layer in held] == [0, 2]
    for layer, stored in zip(explanation.layers, held, strict=True):
        factors = decompose(layer)
        truth = {
            "attention": layer.pattern,
            "signed_contribution": inter_head_contributions(layer),
            "intra_head_contribution": intra_head_contributions(layer),
            "cosine": factors.cosine,
        }
        if gated:  # a value's length differs from query to query
            truth["relative_norm"] = factors.relative_norm
        rows, columns = torch.tril_indices(9, 9) if causal else torch.ones(9, 9).nonzero().T
        for name, edges in truth.items():
            expected = edges[0][:, rows, columns].flatten().numpy()
            scale = np.abs(expected).max()
            error = np.abs(unpacked(stored[name]) - expected).max()
            assert error <= scale / STEPS * 0.5001, name
        if gated:
            continue
        relative = unpacked(stored["value_norm"]).reshape(4, 1, 9) / unpacked(
            stored["output_norm"]
        ).reshape(1, 9, 1)
        np.testing.assert_allclose(relative, factors.relative_norm[0].numpy(), rtol=1e-6)


def test_scores_and_profile_come_back():
    explanation = made_up_explanation(words(9))
    data = prompt_of(explain_page(explanation))
    assert data["score_layers"] == [0, 1, 2]
    for name, stored in data["scores"].items():
        truth = explanation.scores[name][0].mean(dim=1).numpy()
        for row, expected in zip(stored, truth, strict=True):
            np.testing.assert_allclose(unpacked(row), expected, atol=np.abs(expected).max() / STEPS)
    for name in explanation.heads.statistics():
        np.testing.assert_allclose(
            data["profile"][name], getattr(explanation.heads, name).numpy(), rtol=1e-5
        )
    assert data["sinks"] == [row.nonzero().flatten().tolist() for row in explanation.sinks]


def test_packed_zeros_are_zeros_and_nan_is_refused():
    assert unpacked(packed(torch.zeros(3))).tolist() == [0, 0, 0]
    for bad in (torch.nan, torch.inf):
        with pytest.raises(InputError, match="NaN or infinite"):
            packed(torch.tensor([1.0, bad]))


def test_no_token_ends_the_data_or_starts_markup(hostile):
    text = DATA.search(hostile.html)[1]
    assert text.isascii()
    assert not set("<>&") & set(text)
    data = json.loads(text)
    assert tuple(data["prompts"][0]["tokens"]) == HOSTILE
    assert data["recipe"] == "cw-lens explain --text '</script><b>'"
    outside = hostile.html.replace(text, "")
    leaked = [token for token in ("<|im_start|>", "<img·src", "مرحبا", "<b>x") if token in outside]
    assert leaked == []
    assert "made-up" not in outside


def test_script_json_refuses_nan():
    with pytest.raises(ValueError, match="JSON compliant"):
        script_json([float("nan")])


def test_each_library_is_there_once_and_nothing_is_fetched(hostile):
    held = re.findall(r'class="library" data-name="(\w+)-\w{8}">([^<]*)<', hostile.html)
    assert [name for name, _ in held] == ["plotly", "circuitsvis"]
    for (_, packed_text), mark in zip(held, ("plotly.js v", "var CircuitsVis="), strict=True):
        assert mark in gzip.decompress(base64.b64decode(packed_text)).decode()
    ends = [m.start() for m in re.finditer("</script", hostile.html)]
    assert len(ends) == 4  # data, plotly, circuitsvis, the page's own
    head = hostile.html[: hostile.html.index("<style>")]
    assert "default-src 'none'" in head
    body = DATA.sub("", hostile.html)
    own = body[: body.index("<script>")]
    assert not re.search(r"(?:src|href)\s*=", own)
    assert "url(" not in own


@pytest.mark.parametrize(("tokens", "heads"), [(1, 4), (9, 4), (60, 6)])
@pytest.mark.parametrize(("causal", "gated"), [(True, False), (False, False), (True, True)])
def test_the_size_is_known_before(tokens, heads, causal, gated):
    explanation = made_up_explanation(words(tokens), heads=heads, causal=causal, gated=gated)
    page = explain_page(explanation)
    actual = len(page.html.encode())
    assert actual <= page.estimated_bytes <= actual + 3000
    assert page.omissions == ()
    assert prompt_of(page)["held_tokens"] is None


def test_the_strongest_layers_are_kept_first():
    explanation = made_up_explanation(words(60), layers=4, chosen=(0, 1, 3))
    gross = {layer: explanation.heads.gross[layer].sum().item() for layer in (0, 1, 3)}
    whole = explain_page(explanation)
    page = explain_page(explanation, size_budget=whole.estimated_bytes - 1.0)
    weakest = min(gross, key=gross.get)
    assert [layer["index"] for layer in prompt_of(page)["layers"]] == sorted(set(gross) - {weakest})
    assert len(page.omissions) == 1
    assert f"layers {weakest}." in page.omissions[0]
    assert tuple(data_of(page)["omissions"]) == page.omissions
    assert len(page.html.encode()) <= whole.estimated_bytes - 1


def test_then_the_strongest_heads_then_tokens():
    explanation = made_up_explanation(words(60), heads=8)

    def held(size_budget):
        return select(explanation, fixed_bytes=1000, size_budget=float(size_budget))

    one_layer = held(held(1e9).estimated_bytes - 1)
    assert list(one_layer.heads)
    assert len(one_layer.heads) == 1
    layer = next(iter(one_layer.heads))

    fewer_heads = held(one_layer.estimated_bytes - 1)
    assert fewer_heads.tokens == tuple(range(60))
    gross = explanation.heads.gross[layer]
    dropped = set(range(8)) - set(fewer_heads.heads[layer])
    assert dropped == {int(gross.argmin())}
    assert f"heads {min(dropped)}." in fewer_heads.omissions[1]

    fewer_tokens = held(60_000)
    assert len(fewer_tokens.heads[layer]) == FEWEST_HEADS
    kept = fewer_tokens.tokens
    assert kept[0] == 0
    assert list(kept) == sorted(kept)
    assert len(kept) < 60
    score = explanation.scores["contribution"][0].mean(dim=(0, 1))
    gone = sorted(set(range(60)) - set(kept))
    assert score[list(kept[1:])].min() >= score[gone].max()
    assert ranges(gone) in fewer_tokens.omissions[-1]
    assert f"{len(gone)} of the 60 tokens" in fewer_tokens.omissions[-1]


def test_left_out_tokens_leave_the_right_edges():
    explanation = made_up_explanation(words(60), heads=8)
    smallest = explain_page(explanation).estimated_bytes - 4 * 2 * 8 * 1830 * 8 // 3
    page = explain_page(explanation, size_budget=smallest + 60e3)
    data = prompt_of(page)
    kept = data["held_tokens"]
    assert 8 <= len(kept) < 60
    assert len(page.html.encode()) <= page.estimated_bytes <= smallest + 60_000
    stored = data["layers"][0]
    layer = next(x for x in explanation.layers if x.index == stored["index"])
    expected = layer.pattern[0][stored["heads"]][:, kept][:, :, kept]
    rows, columns = torch.tril_indices(len(kept), len(kept))
    np.testing.assert_allclose(
        unpacked(stored["attention"]), expected[:, rows, columns].flatten(), atol=1 / STEPS
    )


def test_layer_scores_give_way_when_they_take_too_much():
    explanation = made_up_explanation(words(400), layers=40, heads=1, chosen=(0,))
    page = explain_page(explanation, size_budget=3.6e6)
    assert NO_LAYER_SCORES not in page.omissions
    scores = explanation.scores
    many = replace(
        scores,
        values={f"{name} {i}": scores[name] for name in scores.metrics for i in range(9)}
        | {"contribution": scores["contribution"], "attention": scores["attention"]},
    )
    page = explain_page(replace(explanation, scores=many), size_budget=3.6e6)
    assert page.omissions[0] == NO_LAYER_SCORES
    data = prompt_of(page)
    assert data["score_layers"] == []
    truth = scores["attention"][0].mean(dim=(0, 1)).numpy()
    np.testing.assert_allclose(
        unpacked(data["scores"]["attention"][0]), truth, atol=truth.max() / STEPS
    )


@pytest.mark.parametrize("budget", [1e6, 0.0, -1.0, float("nan")])
@pytest.mark.parametrize("chosen", [(0,), ()])
def test_an_impossible_budget_is_refused_with_what_is_needed(budget, chosen):
    with pytest.raises(InputError, match=r"take 2\.\d MB\. Raise size_budget"):
        explain_page(made_up_explanation(words(9), chosen=chosen), size_budget=budget)


def test_the_refusal_names_a_budget_that_works():
    explanation = made_up_explanation(words(30))
    with pytest.raises(InputError) as refusal:
        explain_page(explanation, size_budget=1.0)
    needed = float(re.search(r"take ([\d.]+) MB", str(refusal.value))[1])
    assert explain_page(explanation, size_budget=needed * 1e6).estimated_bytes <= needed * 1e6


def test_layers_that_are_not_whole_are_refused():
    explanation = made_up_explanation(words(9))
    block = explanation.layers[0].queries(0, 4)
    with pytest.raises(InputError, match="layer 0 has a pattern of shape"):
        explain_page(replace(explanation, layers=(block,)))


def test_no_layer_chosen_still_makes_a_page():
    page = explain_page(made_up_explanation(words(9), chosen=()))
    assert prompt_of(page)["layers"] == []
    assert len(page.html.encode()) <= page.estimated_bytes + 100


def test_the_verdict_states_the_numbers():
    explanation = made_up_explanation(words(9))
    data = prompt_of(explain_page(explanation))
    attention = explanation.heads.first_attention.mean().item()
    given = explanation.heads.first_contribution.sum(dim=1).mean().item()
    assert percent(attention) in data["verdict"]
    assert percent(given) in data["verdict"]
    assert "·t0" in data["verdict"]


def test_the_verdict_is_honest_about_a_negative_share():
    explanation = made_up_explanation(words(9))
    heads = replace(explanation.heads, first_contribution=torch.full((3, 4), -0.01))
    data = prompt_of(explain_page(replace(explanation, heads=heads)))
    assert "works against the output: its contribution is −4.0\u00a0%" in data["verdict"]


def test_facts_name_what_a_reader_must_know():
    facts = dict(prompt_of(explain_page(made_up_explanation(words(9))))["facts"])
    assert "made-up" in facts["Model"]
    assert "3 layers, 4 heads" in facts["Model"]
    assert "float32" in facts["Weights"]
    assert "0123456789ab" in facts["Weights"]
    assert facts["Text"].startswith("9 tokens, beginning with BOS")
    assert "over 8 predicted tokens" in facts["Loss"]
    assert "3.0e-07 (worst in layer 2; tolerance 1e-04)" in facts["Identity"]
    assert "1 outputs in layers 1" in facts["Low outputs"]


def test_facts_of_odd_runs():
    explanation = made_up_explanation(words(9))
    exact = tuple(
        replace(c, value_error=0.0, output_error=0.0, low_outputs=0)
        for c in explanation.certificates
    )
    odd = replace(
        explanation,
        certificates=exact,
        nll=torch.full((8,), 800.0),
        sinks=torch.ones(3, 9, dtype=torch.bool),
        prompts=replace(explanation.prompts, bos=(False,)),
    )
    facts = dict(prompt_of(explain_page(odd))["facts"])
    assert "bit for bit" in facts["Identity"]
    assert "beyond" in facts["Loss"]
    assert "centred_cosine" in facts["Sinks"]
    assert "no BOS" in facts["Text"]
    assert "Low outputs" not in facts


def test_one_token_is_enough():
    data = prompt_of(explain_page(made_up_explanation(words(1))))
    assert "single token" in data["verdict"]
    assert "nothing is predicted" in dict(data["facts"])["Loss"]


def test_percent_and_ranges_read_well():
    shares = (0.4567, 0.04567, 0.004567, -0.03, -1e-9, 0.0)
    assert [percent(x).replace("\u00a0", " ") for x in shares] == [
        "46 %", "4.6 %", "0.46 %", "−3.0 %", "0.00 %", "0.00 %",
    ]  # fmt: skip
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""


def test_a_page_saves_itself_and_sits_in_a_notebook(hostile, tmp_path):
    path = hostile.save(tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == hostile.html
    frame = hostile._repr_html_()
    held = re.search(r'srcdoc="([^"]*)"', frame)[1]
    assert html.unescape(held) == hostile.html
    assert "allow-same-origin" not in frame
