"""Views of runs, without a browser: what they hold, what they refuse, how a notebook holds them."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import cw_lens
from cw_lens.errors import InputError
from cw_lens.geometry import inter_head_contributions
from cw_lens.studies.explain import explanations
from cw_lens.views import notebook
from cw_lens.views.compare import align
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
    held = unpacked(prompt_of(view)["layers"][0]["mine"])
    np.testing.assert_allclose(held, expected, atol=1e-4)
    size = len(view.html.encode())
    assert size <= view.estimated_bytes <= size + 6000
    names = data_of(cw_lens.show_heads(run, metrics=["cosine", "output_distance"]))
    assert names["metrics"] == ["cosine", "output_distance"]
    assert names["held_metrics"] == ["output_distance"]
    with pytest.raises(InputError, match="unknown metric 'nothing'"):
        cw_lens.show_heads(run, metrics=["nothing"])
    with pytest.raises(InputError, match="metrics is empty"):
        cw_lens.show_heads(run, metrics=[])


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
            unpacked(held["signed_contribution"]), expected, atol=np.abs(expected).max() / 3e4
        )
    assert data["difference"] == "two less one"
    assert "→" in prompt["tokens"][2]
    assert view.omissions == ()
    size = len(view.html.encode())
    assert size <= view.estimated_bytes <= size + 6000
    cut = cw_lens.compare(run, other, names=("one", "two"), size_budget=view.estimated_bytes - 1.0)
    assert "which differ least" in cut.omissions[-1]
    assert len(prompt_of(cut)["layers"]) == 2
    with pytest.raises(InputError, match="cannot hold one layer of this comparison"):
        cw_lens.compare(run, other, size_budget=1e6)


def test_models_of_other_heads_are_compared_by_their_means(model, run):
    from tests.tiny import tiny_llama

    other = cw_lens.wrap_model(tiny_llama(heads=2, groups=2))
    view = cw_lens.compare(run, cw_lens.capture(other, prompts_of(other, A), layers=[0, 1]))
    assert [layer["heads"] for layer in prompt_of(view)["layers"]] == [["mean"], ["mean"]]
    said = " ".join(view.omissions)
    assert "Single heads" in said
    assert "Layers 2, which only one of the runs holds" in said


def test_what_cannot_be_compared_is_refused(model, run):
    with pytest.raises(InputError, match="run B holds 2 prompts"):
        cw_lens.compare(run, cw_lens.capture(model, prompts_of(model, A, B)))
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


def test_without_cells_each_page_holds_its_own(run, monkeypatch):
    view = cw_lens.show_overview(run)
    assert held(view)
    assert held(view)
    monkeypatch.setitem(__import__("sys").modules, "google.colab", SimpleNamespace())
    assert held(view)
