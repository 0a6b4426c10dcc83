"""Views of runs, without a browser: what they hold, what they refuse, how a notebook holds them."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cw_lens
from cw_lens.errors import InputError
from cw_lens.geometry import decompose, inter_head_contributions
from cw_lens.studies.explain import explanations
from cw_lens.studies.heads import HeadProfile
from cw_lens.views import notebook
from cw_lens.views.budget import layer_bytes
from cw_lens.views.differences import align
from cw_lens.views.page import asset
from cw_lens.views.words import percent
from tests.explanations import made_up_run
from tests.test_views import data_of, prompt_of, unpacked

VIEWS = {
    "heads": cw_lens.show_heads,
    "tokens": cw_lens.show_tokens,
    "overview": cw_lens.show_overview,
}


@pytest.fixture(scope="module")
def model():
    from tests.tiny import tiny_llama

    return cw_lens.wrap_model(tiny_llama(heads=4, groups=2, bias=True, layers=3))


def prompts_of(model, *rows, side="right"):
    return cw_lens.prompts_from_ids(model, [list(row) for row in rows], padding_side=side)


A, B = [1, 5, 9, 7, 3, 11], [1, 8, 2, 4]


@pytest.fixture(scope="module")
def run(model):
    return cw_lens.capture(model, prompts_of(model, A))


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_text_of_a_batch_is_read_as_it_is_alone(model, side):
    batch = explanations(cw_lens.capture(model, prompts_of(model, A, B, side=side)))
    for text, ids in zip(batch, (A, B), strict=True):
        (alone,) = explanations(cw_lens.capture(model, prompts_of(model, ids)))
        assert text.prompts.ids[0].tolist() == ids
        assert text.prompts.tokens == alone.prompts.tokens
        for name in text.heads.statistics():
            torch.testing.assert_close(
                getattr(text.heads, name), getattr(alone.heads, name), rtol=1e-4, atol=1e-5
            )
        for name in text.scores.metrics:
            torch.testing.assert_close(text.scores[name], alone.scores[name], rtol=1e-4, atol=1e-5)
        for layer, single in zip(text.layers, alone.layers, strict=True):
            torch.testing.assert_close(
                inter_head_contributions(layer), inter_head_contributions(single),
                rtol=1e-3, atol=1e-5,
            )  # fmt: skip
        assert torch.equal(text.sinks, alone.sinks)


def test_the_cosine_to_the_sink_is_the_literal_one(run):
    (text,) = explanations(run)
    for row, layer in enumerate(run.layers):
        projected = torch.einsum("hkd,hdm->hkm", layer.value[0], layer.W_O)
        unit = projected / projected.norm(dim=-1, keepdim=True)
        literal = (unit[:, 1:] * unit[:, :1]).sum(-1).mean(-1)
        torch.testing.assert_close(text.heads.sink_cosine[row], literal, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(VIEWS))
def test_a_batch_is_held_prompt_by_prompt(model, name):
    view = VIEWS[name](cw_lens.capture(model, prompts_of(model, A, B)))
    held = data_of(view)["prompts"]
    assert [prompt["ids"] for prompt in held] == [A, B]
    assert [len(prompt["layers"]) for prompt in held] == [3, 3]
    size = len(view.html.encode())
    assert size <= view.estimated_bytes <= size + 6000
    assert view.omissions == ()


def test_a_view_holds_no_library_that_it_does_not_draw_with(run):
    names = {name: re.findall(r'data-name="(\w+)-', view(run).html) for name, view in VIEWS.items()}
    assert names == {"heads": ["plotly", "circuitsvis"], "tokens": [], "overview": ["plotly"]}


def test_heads_begin_where_they_are_told(run):
    assert data_of(cw_lens.show_heads(run, 1))["start_layer"] == 1
    assert data_of(cw_lens.show_heads(run, -1))["start_layer"] == 2
    heads = explanations(run)[0].heads
    gap = (heads.first_attention.mean(1) - heads.first_contribution.sum(1)).abs()
    assert data_of(cw_lens.show_heads(run))["start_layer"] == int(gap.argmax())
    tight = cw_lens.show_heads(run, 1).estimated_bytes - 1.0
    kept = cw_lens.show_heads(run, 1, size_budget=tight)
    assert 1 in [layer["index"] for layer in prompt_of(kept)["layers"]]
    assert len(kept.omissions) == 1
    with pytest.raises(InputError, match="does not hold layer 7; it holds 0, 1, 2"):
        cw_lens.show_heads(run, 7)
    with pytest.raises(InputError, match="does not hold layer -4"):
        cw_lens.show_heads(run, -4)


def test_a_metric_of_ones_own_is_held_with_its_sign(run):
    def mine(layer):
        return layer.pattern - 0.1

    view = cw_lens.show_heads(run, metrics={"mine": mine, "twice": lambda x: 2 * x.pattern})
    data = data_of(view)
    assert data["metrics"] == ["mine", "twice"]
    assert data["signed"] == ["mine"]
    assert data["told"][-2:] == ["mine", "twice"]
    rows, columns = np.tril_indices(len(A))
    expected = run.layers[0].pattern[0][:, rows, columns].flatten().numpy() - 0.1
    held = unpacked(prompt_of(view)["layers"][0]["own"]["mine"])
    np.testing.assert_allclose(held, expected, atol=1e-4)
    size = len(view.html.encode())
    assert size <= view.estimated_bytes <= size + 6000
    names = data_of(cw_lens.show_heads(run, metrics=["cosine", "output_distance"]))
    assert names["metrics"] == ["cosine", "output_distance"]
    assert names["held_metrics"] == ["output_distance"]
    shipped = {"attention": cw_lens.METRICS["attention"], "mine": mine}
    assert data_of(cw_lens.show_heads(run, metrics=shipped))["held_metrics"] == ["mine"]
    with pytest.raises(InputError, match="of your own is called 'attention', which the page has"):
        cw_lens.show_heads(run, metrics={"attention": mine})
    with pytest.raises(InputError, match="unknown metric 'nothing'"):
        cw_lens.show_heads(run, metrics=["nothing"])
    with pytest.raises(InputError, match="metrics is empty"):
        cw_lens.show_heads(run, metrics=[])


def test_text_is_coloured_by_the_metrics_named(run):
    assert data_of(cw_lens.show_tokens(run))["text_metrics"][0] == "contribution"

    def mine(layer):
        return layer.pattern * 2

    data = data_of(cw_lens.show_tokens(run, metrics=["value_weighted", "cosine"]))
    assert data["text_metrics"] == ["value_weighted", "cosine"]
    prompt = prompt_of(cw_lens.show_tokens(run, metrics={"mine": mine}))
    for row, layer in enumerate(run.layers):
        seen = torch.arange(len(A), 0, -1)
        expected = (2 * layer.pattern[0].sum(dim=1) / seen).mean(dim=0).numpy()
        np.testing.assert_allclose(unpacked(prompt["scores"]["mine"][row]), expected, atol=1e-4)
    cosine = torch.where(run.layers[0].edge_mask[:, None], decompose(run.layers[0]).cosine, 0.0)
    expected = (cosine[0].sum(dim=1) / torch.arange(len(A), 0, -1)).mean(dim=0).numpy()
    prompt = prompt_of(cw_lens.show_tokens(run, metrics=["cosine"]))
    np.testing.assert_allclose(unpacked(prompt["scores"]["cosine"][0]), expected, atol=1e-4)


def test_one_colour_range_serves_all_prompts_layers_and_heads(model):
    run = cw_lens.capture(model, prompts_of(model, A, B))
    ranges = data_of(cw_lens.show_heads(run))["ranges"]
    sizes = []
    for row in (0, 1):
        for layer in run.layers:
            text = layer.text(row)
            rows, columns = np.tril_indices(text.pattern.shape[-1])
            sizes += inter_head_contributions(text)[0][:, rows, columns].abs().flatten().tolist()
    sizes = np.sort(sizes)
    most = sizes[int(np.ceil(0.99 * len(sizes))) - 1]
    expected = {"largest": sizes[-1], "most": most}
    assert ranges["signed_contribution"] == pytest.approx(expected, rel=1e-5)


def test_low_outputs_are_counted_text_by_text(model):
    run = cw_lens.capture(model, prompts_of(model, A, B))
    short = replace(run.layers[0], output=run.layers[0].output.clone())
    short.output[1, 0] = 0
    short.output[1, 1] = 0
    texts = explanations(replace(run, layers=(short, *run.layers[1:])))
    assert [text.certificates[0].low_outputs for text in texts] == [0, 2]


def test_an_error_that_was_not_measured_is_not_shown_as_none_at_all(run):
    unchecked = tuple(replace(c, output_error=None) for c in run.certificates)
    data = data_of(cw_lens.show_heads(replace(run, certificates=unchecked)))
    assert [row[2] for row in data["certificates"]] == [None] * 3
    said = dict(data["prompts"][0]["facts"])["Identity"]
    assert "the cache held no output to compare with" in said


def test_every_statistic_has_a_map():
    script = asset("maps.js")
    assert set(re.findall(r'{ name: "(\w+)", title', script)) == set(HeadProfile.statistics())


def test_the_query_asked_for_is_kept(run):
    made = made_up_run(tokens=60, heads=6, layers=2)
    whole = cw_lens.show_tokens(made)
    budget = whole.estimated_bytes - 1.9 * layer_bytes(6, 60, True)
    for query in range(1, 60, 7):
        held = prompt_of(cw_lens.show_tokens(made, query=query, size_budget=budget))["held_tokens"]
        assert held[0] == 0
        assert query in held


def test_queries_and_statistics_are_checked(run):
    assert data_of(cw_lens.show_tokens(run, query=-1))["start_query"] == len(A) - 1
    with pytest.raises(InputError, match="there is no query 6; the first prompt has tokens 0 to 5"):
        cw_lens.show_tokens(run, query=6)
    assert data_of(cw_lens.show_overview(run, "gross"))["statistics"] == ["gross"]
    with pytest.raises(InputError, match="unknown statistic 'size'"):
        cw_lens.show_overview(run, "size")


@pytest.mark.parametrize("name", list(VIEWS))
def test_runs_without_layers_are_refused(model, name):
    reduced = cw_lens.capture(model, prompts_of(model, A), reduce=lambda layer: layer.index)
    with pytest.raises(InputError, match=r"this run holds int\. Use capture"):
        VIEWS[name](reduced)


def test_padding_within_a_text_is_refused(run):
    layer = run.layers[0]
    with pytest.raises(InputError, match="holds a block of the queries"):
        layer.queries(1, 3).text(0)
    from dataclasses import replace

    torn = layer.mask.clone()
    torn[0, 2] = False
    with pytest.raises(InputError, match="padding between its tokens"):
        replace(layer, mask=torn).text(0)


def test_texts_align_by_equal_runs_and_equal_replacements():
    one, two = (
        align(["a", "b", "c", "d"], ["a", "b", "x", "d"]),
        align(["a", "c", "d"], ["a", "b", "c", "d"]),
    )
    assert (one.first, one.second) == ((0, 1, 2, 3), (0, 1, 2, 3))
    assert (two.first, two.second) == ((0, 1, 2), (0, 2, 3))
    gone = align(["a", "x", "y", "d"], ["a", "z", "d"])
    assert (gone.first, gone.second) == ((0, 3), (0, 2))


def test_a_comparison_holds_the_differences(model, run):
    other = cw_lens.capture(model, prompts_of(model, [1, 5, 8, 7, 3, 11]))
    view = cw_lens.compare(run, other, names=("one", "two"))
    data, prompt = data_of(view), prompt_of(view)
    rows, columns = np.tril_indices(len(A))
    for held, a, b in zip(prompt["layers"], run.layers, other.layers, strict=True):
        change = (inter_head_contributions(b) - inter_head_contributions(a))[0].numpy()
        expected = change[:, rows, columns].flatten()
        np.testing.assert_allclose(
            unpacked(held["own"]["signed_contribution"]),
            expected,
            atol=np.abs(expected).max() / 3e4,
        )
    assert data["difference"] == "two less one"
    assert "→" in prompt["tokens"][2]
    assert view.omissions == ()
    size = len(view.html.encode())
    assert size <= view.estimated_bytes <= size + 6000
    cut = cw_lens.compare(run, other, names=("one", "two"), size_budget=view.estimated_bytes - 1.0)
    assert "with the largest change in contribution" in cut.omissions[-1]
    assert len(prompt_of(cut)["layers"]) == 2
    with pytest.raises(InputError, match="cannot be made"):
        cw_lens.compare(run, other, size_budget=1e6)


def test_a_comparison_over_its_budget_keeps_what_changes_most():
    a, b = (made_up_run(tokens=60, heads=6, layers=2, seed=seed) for seed in (0, 1))
    whole = cw_lens.compare(a, b)
    change = inter_head_contributions(b.layers[0]) - inter_head_contributions(a.layers[0])
    changes = [
        (inter_head_contributions(y) - inter_head_contributions(x))[0].abs()
        for x, y in zip(a.layers, b.layers, strict=True)
    ]
    around = whole.estimated_bytes - 2 * layer_bytes(6, 60, True, matrices=8)
    budget = around + 800.0 + layer_bytes(4, 40, True, matrices=8)
    view = cw_lens.compare(a, b, size_budget=budget)
    (layer,) = prompt_of(view)["layers"]
    strongest = int(np.argmax([change.sum() for change in changes]))
    assert layer["index"] == strongest
    by_head = changes[strongest].sum(dim=(1, 2))
    assert layer["heads"] == sorted(by_head.topk(4).indices.tolist())
    held = prompt_of(view)["held_tokens"]
    by_token = sum(change.sum(dim=(0, 1)) for change in changes)
    by_token[0] = torch.inf
    assert held == sorted(by_token.topk(len(held)).indices.tolist())
    assert 8 <= len(held) <= 40
    size = len(view.html.encode())
    assert size <= view.estimated_bytes <= budget
    assert len(view.omissions) == 3
    rows, columns = np.tril_indices(len(held))
    change = inter_head_contributions(b.layers[strongest]) - inter_head_contributions(
        a.layers[strongest]
    )
    expected = change[0][layer["heads"]][:, held][:, :, held][:, rows, columns].flatten().numpy()
    stored = unpacked(layer["own"]["signed_contribution"])
    np.testing.assert_allclose(stored, expected, atol=np.abs(expected).max() / 3e4)


def test_models_of_other_heads_are_compared_as_wholes(model, run):
    from tests.tiny import tiny_llama

    other = cw_lens.wrap_model(tiny_llama(heads=2, groups=2))
    other = cw_lens.capture(other, prompts_of(other, A), layers=[0, 1])
    view = cw_lens.compare(run, other)
    assert [layer["heads"] for layer in prompt_of(view)["layers"]] == [["all"], ["all"]]
    rows, columns = np.tril_indices(len(A))
    for held, a, b in zip(prompt_of(view)["layers"], run.layers, other.layers, strict=False):
        for name, expected in (
            (
                "signed_contribution",
                inter_head_contributions(b)[0].sum(0) - inter_head_contributions(a)[0].sum(0),
            ),
            ("attention", b.pattern[0].mean(0) - a.pattern[0].mean(0)),
        ):
            exact = expected[rows, columns].numpy()
            stored = unpacked(held["own"][name])
            np.testing.assert_allclose(stored, exact, atol=np.abs(exact).max() / 3e4)
    heads = explanations(run)[0].heads
    share = percent(heads.first_contribution[:2].sum(1).mean().item())
    assert f"gives {share} of the output in A" in prompt_of(view)["detail"]  # of common layers
    said = " ".join(view.omissions)
    assert "Single heads" in said
    assert "Layers 2, which only one of the runs holds" in said


def test_what_cannot_be_compared_is_refused(model, run):
    with pytest.raises(InputError, match="run B holds 2 prompts"):
        cw_lens.compare(run, cw_lens.capture(model, prompts_of(model, A, B)))
    elsewhere = replace(
        run, certificates=tuple(replace(c, space="attention") for c in run.certificates)
    )
    with pytest.raises(InputError, match="run A was measured in residual space and run B in att"):
        cw_lens.compare(run, elsewhere)
    low = cw_lens.capture(model, prompts_of(model, A), layers=[0])
    high = cw_lens.capture(model, prompts_of(model, A), layers=[2])
    with pytest.raises(InputError, match="no common layer: 0 and 2"):
        cw_lens.compare(low, high)
    with pytest.raises(InputError, match="no token in common place"):
        cw_lens.compare(run, cw_lens.capture(model, prompts_of(model, [12, 13])))


def test_a_page_is_saved_by_its_ending(run, tmp_path, monkeypatch):
    view = cw_lens.show_tokens(run)
    assert repr(view).startswith("Page(estimated_bytes=")
    with pytest.raises(InputError, match=r"cannot save a page as 'x\.jpeg'.*\.png, \.svg, \.pdf"):
        view.save(tmp_path / "x.jpeg")
    with pytest.raises(InputError, match="cannot write .*No such file or directory"):
        view.save(tmp_path / "nowhere" / "x.html")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    with pytest.raises(InputError, match=r"needs a browser, and there is no chromium"):
        view.save(tmp_path / "x.png")
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chromium")
    with pytest.raises(InputError, match=r"/nowhere/chromium did not draw x\.svg"):
        view.save(tmp_path / "x.svg")
    monkeypatch.setattr("cw_lens.views.pictures.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs kaleido .*pip install 'cw-lens\[figures\]'"):
        view.save(tmp_path / "x.pdf")
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".png", ".svg", ".pdf")]


@pytest.fixture
def session(monkeypatch):
    """A stand-in for a kernel that runs one cell after another."""
    state = SimpleNamespace(execution_count=0, kernel=SimpleNamespace(get_parent=None))

    def cell(name, code="view"):
        state.execution_count += 1
        metadata = {"cellId": name} if name else {}
        parent = {"metadata": metadata, "content": {"code": code}}
        state.kernel.get_parent = lambda channel: parent

    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: state)
    monkeypatch.setattr(notebook, "_homes", {})
    return cell


def held(view) -> bool:
    frame = view._repr_html_()
    outside = 'cw_lens_libraries["plotly-' in frame
    inside = "data-name=&quot;plotly-" in frame and "H4sI" in frame[frame.index("srcdoc") :]
    assert not (outside and inside)
    return outside or inside


@pytest.mark.parametrize("named", [True, False])
def test_a_notebook_holds_each_library_once(run, session, named):
    view = cw_lens.show_overview(run)

    def shown(cell):
        session(cell if named else None, code=cell)
        return held(view)

    assert shown("first")
    assert not held(view)  # again in the same output
    assert not shown("second")
    assert shown("first")  # run again, its old output is gone
    assert not shown("second")
    # the remedy that a view names where that cell is gone
    assert "cw_lens.views.forget_libraries()" in view.html
    cw_lens.views.forget_libraries()
    assert shown("second")
    assert not shown("third")


def test_without_cells_each_page_holds_its_own(run, monkeypatch):
    view = cw_lens.show_overview(run)
    assert held(view)
    assert held(view)
    monkeypatch.setitem(__import__("sys").modules, "google.colab", SimpleNamespace())
    assert held(view)
