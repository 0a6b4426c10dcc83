"""Views of runs in Chromium: what is drawn is what the run holds; a click changes it."""

import re

import numpy as np
import pytest

import cw_lens
from cw_lens.geometry import decompose, inter_head_contributions
from cw_lens.views.budget import layer_bytes
from tests.browser import opened
from tests.explanations import HOSTILE
from tests.test_show import A, B, prompts_of
from tests.test_views import prompt_of

pytestmark = pytest.mark.browser

FILLS = """id => [...document.querySelectorAll(`#${id} .token`)].map((token) => {
  const fill = token.style.getPropertyValue('--fill');
  const size = Number(fill.match(/ ([0-9.]+)%/)[1]) / 100;
  return fill.includes('negative') ? -size : size;
})"""
EDGES = "document.getElementById('large').data[0].z"


@pytest.fixture(scope="module")
def model():
    from tests.tiny import tiny_llama

    return cw_lens.wrap_model(tiny_llama(heads=4, groups=2, bias=True, layers=3))


@pytest.fixture(scope="module")
def run(model):
    return cw_lens.capture(model, prompts_of(model, A, B))


@pytest.fixture
def shown(chromium, tmp_path):
    """Opens a view; afterwards it must have been silent and alone."""
    import contextlib

    with contextlib.ExitStack() as stack:

        def show(view, **options):
            path = view.save(tmp_path / "view.html")
            page = stack.enter_context(opened(chromium, path, **options))
            stack.callback(lambda: check(page, path))
            return page

        yield show


def check(page, path):
    assert page.complaints == []
    assert page.requests == [path.as_uri()]


def lower(edges):
    rows, columns = np.tril_indices(edges.shape[-1])
    return edges[..., rows, columns]


def large(page):
    page.settle()
    return np.array(page.tab.evaluate(EDGES), dtype=float)


def hover(page, plot, query, key, tokens):
    """Moves the mouse over the middle of a cell of a map of queries by keys."""
    page.tab.evaluate("id => document.getElementById(id).scrollIntoView({ block: 'center' })", plot)
    page.settle()
    box = page.tab.locator(f"#{plot} .nsewdrag").bounding_box()
    x = box["x"] + (key + 0.5) / tokens * box["width"]
    y = box["y"] + (query + 0.5) / tokens * box["height"]
    page.tab.mouse.move(x - 3, y)
    page.tab.mouse.move(x, y)
    page.tab.wait_for_timeout(150)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_fits_its_window(shown, run, model, width, theme):
    other = cw_lens.capture(model, prompts_of(model, B))
    first = cw_lens.capture(model, prompts_of(model, A))
    for view in (
        cw_lens.show_heads(run), cw_lens.show_tokens(run), cw_lens.show_overview(run),
        cw_lens.compare(first, other),
    ):  # fmt: skip
        page = shown(view, width=width, theme=theme)
        page.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.settle()
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


def test_heads_follow_the_metric_the_layer_the_prompt_and_the_mouse(shown, run):
    page = shown(cw_lens.show_heads(run, 0))
    page.show_heads(4)
    layer = run.layers[0].text(0)
    signed = inter_head_contributions(layer)[0].numpy()
    drawn = large(page)
    assert drawn.shape == (len(A), len(A))
    np.testing.assert_allclose(lower(drawn), lower(signed.mean(0)), atol=1e-4)
    assert np.isnan(drawn[np.triu_indices(len(A), 1)]).all()

    page.tab.locator("#head-grid [data-head='2']").hover()
    np.testing.assert_allclose(lower(large(page)), lower(signed[2]), atol=1e-4)
    page.tab.mouse.move(2, 2)
    np.testing.assert_allclose(lower(large(page)), lower(signed.mean(0)), atol=1e-4)

    page.tab.locator("#head-grid [data-head='3']").click()
    page.tab.mouse.move(2, 2)
    factors = decompose(layer)
    for metric, edges in (
        ("cosine", factors.cosine),
        ("relative_norm", factors.relative_norm),
        ("attention", factors.attention),
    ):
        page.tab.locator(f"#grid-controls input[value={metric}]").check(force=True)
        exact = edges[0, 3].numpy()
        np.testing.assert_allclose(
            lower(large(page)), lower(exact), atol=1e-3 * np.abs(lower(exact)).max()
        )
    hover(page, "large", 4, 1, len(A))
    told = page.tab.locator("#grid-readout").text_content()
    assert "L0 H3 · query 4" in told
    assert "key 1" in told
    exact = {
        "attention": factors.attention[0, 3, 4, 1],
        "relative norm": factors.relative_norm[0, 3, 4, 1],
        "cosine": factors.cosine[0, 3, 4, 1],
        "signed contribution": signed[3, 4, 1],
    }
    for name, value in exact.items():
        said = re.search(rf"\b{name} [^0-9−]*(−?[0-9.e−]+)", told).group(1)
        assert float(said.replace("−", "-")) == pytest.approx(float(value), rel=5e-3, abs=2e-4)

    page.tab.locator("#grid-controls input[type=range]").fill("2")
    exact = run.layers[2].text(0).pattern[0, 3].numpy()
    np.testing.assert_allclose(lower(large(page)), lower(exact), atol=1e-4)
    assert page.tab.locator("#large-name").text_content().startswith("L2 H3")

    page.tab.get_by_label("Prompt").select_option("1")
    page.show_heads(4)
    exact = run.layers[2].text(1).pattern[0, 3].numpy()  # what was chosen stays
    np.testing.assert_allclose(lower(large(page)), lower(exact), atol=1e-4)


def test_the_small_heads_tell_their_negative_cells_and_the_chosen_one(shown, run):
    page = shown(cw_lens.show_heads(run, 0))
    page.show_heads(4)
    assert page.tab.locator("#head-grid [aria-pressed=true]").get_attribute("data-head") == "-1"
    edges = inter_head_contributions(run.layers[0].text(0))[0].numpy()
    top = float(page.tab.locator("#grid-bar .bar").get_attribute("data-top"))
    for head, exact in enumerate(edges):
        dots = page.tab.locator(f"#head-grid [data-head='{head}'] .dots path")
        drawn = sum(path.get_attribute("d").count("M") for path in dots.all())
        assert drawn == (exact < -top / 20).sum()
    page.tab.locator("#grid-controls input[value=attention]").check(force=True)
    page.settle()
    assert page.tab.locator("#head-grid .dots").count() == 0


def test_a_query_is_what_is_clicked(shown, run):
    page = shown(cw_lens.show_tokens(run))
    layers = [layer.text(0) for layer in run.layers]

    def expected(query):
        rows = [inter_head_contributions(x)[0, :, query].abs().mean(0).numpy() for x in layers]
        attention = [x.pattern[0, :, query].mean(0).numpy() for x in layers]
        lines = [np.mean(part, axis=0) for part in (attention, rows)]
        shares = [line / line.sum() for line in lines]
        top = max(line.max() for line in shares)
        return [np.sqrt(line / top) for line in shares]

    assert "Score of each token" in page.tab.locator("#text-query").text_content()
    before = page.tab.evaluate(FILLS, "line-lower")
    page.tab.locator("#line-lower .token").nth(3).click()
    assert "What query 3" in page.tab.locator("#text-query").text_content()
    assert "(mean over layers 0-2, " in page.tab.locator("#text-query").text_content()
    for line, exact in zip(("line-attention", "line-lower"), expected(3), strict=True):
        np.testing.assert_allclose(page.tab.evaluate(FILLS, line), exact, atol=2e-2)
    assert page.tab.locator("#line-lower .token.unseen").count() == len(A) - 4
    page.tab.locator("#text-controls select").nth(3).select_option("1")
    assert "head 1" in page.tab.locator("#text-query").text_content()
    page.tab.locator("#text-controls select").nth(3).select_option("-1")
    page.tab.get_by_role("button", name="Back to token scores").click()
    assert page.tab.evaluate(FILLS, "line-lower") == before
    page.tab.locator("#line-lower").focus()
    page.tab.keyboard.press("Enter")
    assert "What query" in page.tab.locator("#text-query").text_content()
    page.tab.keyboard.press("Escape")
    assert page.tab.evaluate(FILLS, "line-lower") == before


def test_a_single_head_is_scored_from_its_edges(shown, run):
    page = shown(cw_lens.show_tokens(run))
    page.tab.locator("#text-controls select").first.select_option("1")
    page.tab.locator("#text-controls select").nth(3).select_option("2")
    exact = [
        cw_lens.studies.explain.explanations(run)[0].scores[name][0, 1, 2].numpy()
        for name in ("attention", "contribution")
    ]
    shares = [line / line.sum() for line in exact]
    top = max(line.max() for line in shares)
    for line, share in zip(("line-attention", "line-lower"), shares, strict=True):
        drawn = page.tab.evaluate(FILLS, line)
        np.testing.assert_allclose(drawn, np.sqrt(share / top), atol=2e-2)


def test_the_overview_opens_the_head_that_is_clicked(shown, run):
    page = shown(cw_lens.show_overview(run, ["net", "sink_cosine"]))
    plots = page.plots("maps")
    assert [plot["name"] for plot in plots] == ["map-net", "map-sink_cosine"]
    assert np.array(plots[0]["z"]).shape == (4, 3)
    box = page.tab.locator("#map-net .nsewdrag").bounding_box()
    page.tab.mouse.click(box["x"] + 2.5 / 3 * box["width"], box["y"] + 1.5 / 4 * box["height"])
    page.settle()
    values = [box.input_value() for box in page.tab.locator("#factor-controls select").all()]
    assert values == ["2", "1"]


def test_a_comparison_shows_what_changes(shown, model):
    a = cw_lens.capture(model, prompts_of(model, A))
    b = cw_lens.capture(model, prompts_of(model, [1, 5, 8, 7, 3, 11]))
    page = shown(cw_lens.compare(a, b, names=("one", "two")))
    page.show_heads(4)
    place = int(page.tab.locator("#grid-controls input[type=range]").input_value())
    change = inter_head_contributions(b.layers[place]) - inter_head_contributions(a.layers[place])
    np.testing.assert_allclose(lower(large(page)), lower(change[0].mean(0).numpy()), atol=2e-4)
    page.tab.locator("#compare-b .token").nth(2).hover()
    told = page.tab.locator("#compare-readout").text_content()
    assert told.startswith("one ")
    assert "change" in told
    assert page.tab.locator("#compare-a .token").count() == len(A)


def test_hostile_tokens_are_text_in_every_view(shown, model):
    from dataclasses import replace

    ids = [1, *range(2, 1 + len(HOSTILE))]
    made = cw_lens.capture(model, prompts_of(model, ids))
    made = replace(made, prompts=replace(made.prompts, tokens=(HOSTILE,)))
    page = shown(cw_lens.show_tokens(made))
    assert page.tab.locator("#line-lower .token").all_text_contents() == list(HOSTILE)
    page = shown(cw_lens.compare(made, made, names=("</script><b>", '"&')))
    assert page.tab.locator("#compare-a .token").all_text_contents() == list(HOSTILE)
    assert "</script><b>" in page.tab.locator("h1").text_content()
    assert page.tab.locator(".token *").count() == 0
    page = shown(cw_lens.show_heads(made))
    page.show_heads(4)
    page.tab.locator("#large .ytick text").first.wait_for()
    assert "</script>" in page.tab.locator("#large .ytick text").all_text_contents()
    hover(page, "large", 5, HOSTILE.index("</script>"), len(HOSTILE))
    assert "</script>" in page.tab.locator("#large .hovertext").text_content()
    assert page.tab.locator("#grid-readout bdi").all_text_contents()[1] == "</script>"
    assert page.tab.locator("#grid-readout script, #large script, img").count() == 0
    page = shown(cw_lens.show_overview(made, "net"))
    page.plots("factors")
    hover(page, "factor-attention", 5, HOSTILE.index("</script>"), len(HOSTILE))
    assert "</script>" in page.tab.locator("#factor-attention .hovertext").text_content()


def test_every_choice_of_every_view_is_drawn_in_silence(shown, model, run):
    """Complaints are checked when the pages are closed."""
    a, b = (cw_lens.capture(model, prompts_of(model, ids)) for ids in (A, [1, 5, 8, 7, 3]))
    for view in (
        cw_lens.show_heads(run), cw_lens.show_tokens(run), cw_lens.show_overview(run),
        cw_lens.show_tokens(run, metrics=["cosine", "value_weighted"], query=2),
        cw_lens.show_tokens(run, metrics={"mine": lambda x: x.pattern}),
        cw_lens.compare(a, b),
    ):  # fmt: skip
        page = shown(view)
        page.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.settle()
        changed = page.tab.evaluate("""() => {
          let changed = 0;
          for (let at = 0; at < document.querySelectorAll('main select').length; at++) {
            const { options: offered } = document.querySelectorAll('main select')[at];
            const options = [...offered].map((o) => o.value);
            for (const value of options) {
              const box = document.querySelectorAll('main select')[at];
              if (!box || ![...box.options].some((o) => o.value === value)) continue;
              box.value = value;
              box.dispatchEvent(new Event('change'));
              changed++;
            }
          }
          for (const input of document.querySelectorAll('main input[type=radio]')) {
            input.click();
            changed++;
          }
          return changed;
        }""")
        assert changed > 2
        page.settle()


def test_text_begins_with_the_metric_named_first(shown, run):
    page = shown(cw_lens.show_tokens(run, metrics=["value_weighted", "cosine"]))
    lower_line = page.tab.get_by_label("Lower line")
    assert lower_line.input_value() == "value_weighted"
    assert lower_line.locator("option").count() == 2
    cosine = decompose(run.layers[1].text(0)).cosine[0]
    lower_line.select_option("cosine")
    page.tab.get_by_label("Layer").select_option("1")
    scores = np.tril(cosine.numpy()).sum(axis=1).mean(axis=0) / np.arange(len(A), 0, -1)
    shares = scores / np.abs(scores).sum()
    attention = run.layers[1].text(0).pattern[0].sum(dim=1).mean(dim=0).numpy()
    attention /= np.arange(len(A), 0, -1)
    top = max(np.abs(shares).max(), (attention / attention.sum()).max())
    expected = np.sign(shares) * np.sqrt(np.abs(shares) / top)
    np.testing.assert_allclose(page.tab.evaluate(FILLS, "line-lower"), expected, atol=2e-2)


def test_what_is_left_out_says_so_where_it_is_asked_for(shown):
    from tests.explanations import made_up_run

    made = made_up_run(tokens=60, heads=6, layers=2)
    whole = cw_lens.show_tokens(made)
    budget = whole.estimated_bytes - 1.9 * layer_bytes(6, 60, True)
    view = cw_lens.show_tokens(made, query=40, size_budget=budget)
    page = shown(view)
    held = prompt_of(view)["held_tokens"]
    gone = next(token for token in range(60) if token not in held)
    said = page.tab.locator("#text-query").text_content()
    assert "What query 40" in said
    assert "mean over the heads held" in said
    assert (
        f"of the {len(held)} tokens whose edges the page holds"
        in page.tab.locator("#text-lines").text_content()
    )
    page.tab.locator("#line-lower .token").nth(gone).click()
    assert "its edges are not on this page" in page.tab.locator("#text-readout").text_content()
    assert "What query 40" in page.tab.locator("#text-query").text_content()
    assert page.tab.locator("#line-lower .token.absent").count() == 60 - len(held)


def test_what_was_chosen_stays_from_prompt_to_prompt(shown, run):
    page = shown(cw_lens.show_heads(run, 0))
    page.show_heads(4)
    top = page.tab.locator("#grid-bar .bar").get_attribute("data-top")
    page.tab.locator("#grid-controls input[value=cosine]").check(force=True)
    page.tab.locator("#grid-controls input[type=range]").fill("2")
    page.tab.locator("#head-grid [data-head='3']").click()
    page.tab.get_by_label("Prompt").select_option("1")
    page.show_heads(4)
    page.tab.mouse.move(2, 2)
    exact = decompose(run.layers[2].text(1)).cosine[0, 3].numpy()
    np.testing.assert_allclose(lower(large(page)), lower(exact), atol=1e-3)
    page.tab.locator("#grid-controls input[value=signed_contribution]").check(force=True)
    assert page.tab.locator("#grid-bar .bar").get_attribute("data-top") == top


def test_a_comparison_names_the_positions_in_both_texts(shown, model):
    a = cw_lens.capture(model, prompts_of(model, [1, 5, 9, 7, 3]))
    b = cw_lens.capture(model, prompts_of(model, [1, 6, 8, 5, 9, 7, 3]))
    page = shown(cw_lens.compare(a, b))
    page.show_heads(4)
    hover(page, "large", 3, 0, 5)
    assert "query 3→5" in page.tab.locator("#grid-readout").text_content()
    assert "3→5\t" in page.tab.locator("#token-table").text_content()
    assert page.tab.locator("#certificates tbody tr").count() == 6


@pytest.mark.slow
def test_saved_svgs_use_colours_that_every_reader_knows(run, model, tmp_path):
    a, b = (cw_lens.capture(model, prompts_of(model, ids)) for ids in (A, [1, 5, 8, 7, 3, 11]))
    for view in (cw_lens.show_tokens(run), cw_lens.compare(a, b)):
        text = view.save(tmp_path / "view.svg").read_text()
        assert "color(" not in text
        assert "color-mix" not in text
        assert re.search(r'fill="rgb\(\d+,\d+,\d+\)" fill-opacity="0\.\d+"', text)  # a token
        stops = re.findall(r'stop-color="(rgb\([\d,]+\))" stop-opacity="([\d.]+)"', text)
        assert stops
        assert all(colour != "rgb(0,0,0)" for colour, _ in stops)


def test_a_metric_of_ones_own_is_drawn(shown, run):
    view = cw_lens.show_heads(run, 0, metrics={"mine <b>": lambda x: x.pattern - 0.2})
    page = shown(view)
    page.show_heads(4)
    exact = run.layers[0].text(0).pattern[0].mean(0).numpy() - 0.2
    np.testing.assert_allclose(lower(large(page)), lower(exact), atol=1e-4)
    assert "mine <b>" in page.tab.locator("#grid-controls legend + .choices").text_content()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_view_is_saved_as_a_picture(run, tmp_path, ending):
    path = cw_lens.show_heads(run).save(tmp_path / f"heads.{ending}")
    content = path.read_bytes()
    if ending == "png":
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(content[16:20], "big") == 2000
    if ending == "pdf":
        assert content.startswith(b"%PDF-")
        assert content.count(b"/Type /Page\n") == 1
    if ending == "svg":
        text = content.decode()
        assert "Heads of one layer" in text
        assert text.count("<image") >= 5  # the mean and each head
        assert "Colour range" not in text  # no controls


@pytest.mark.slow
def test_many_heads_and_tokens_stay_small_and_are_drawn(shown):
    """32 heads of 512 tokens, and 9 heads of 30 layers of 64 tokens with all metrics."""
    from tests.explanations import made_up_run

    wide = cw_lens.show_heads(made_up_run(tokens=512, heads=32, layers=1))
    assert len(wide.html.encode()) < 25e6
    assert "heads" in wide.omissions[0]
    page = shown(wide)
    page.tab.locator("#large .hm image").wait_for(state="attached", timeout=60_000)
    heads = page.tab.evaluate("document.querySelectorAll('#head-grid .head').length")
    page.show_heads(heads - 1)
    assert heads > 5
    whole = cw_lens.show_heads(made_up_run(tokens=64, heads=9, layers=30))
    assert whole.omissions == ()
    assert len(whole.html.encode()) < 12e6
