"""The explain page in Chromium: it draws everything, and draws what the numbers say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cw_lens.geometry import decompose, inter_head_contributions, intra_head_contributions
from cw_lens.views import explain_page
from tests.browser import SECTIONS, opened
from tests.explanations import HOSTILE, made_up_explanation

pytestmark = pytest.mark.browser

HEADS = 4
NEGATIVE, POSITIVE, WHITE = [156, 74, 2], [11, 74, 143], [255, 255, 255]
CELLS = """([head, tokens]) => {
  const canvas = document.querySelector(`#head-grid [data-head="${head}"] canvas`);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d');
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const at = (place, size) => Math.floor((place + 0.5) / tokens * size);
  const places = [...Array(tokens).keys()];
  return places.map((query) => places.map((key) => {
    const start = 4 * (at(query, canvas.height) * canvas.width + at(key, canvas.width));
    return [...data.slice(start, start + 3)];
  }));
}"""
"""Colour of the middle of each cell of one small map, by query and key."""
GRID_PIXELS = "[...document.querySelectorAll('#head-grid canvas')].map((c) => c.toDataURL())"


def words(count: int) -> tuple[str, ...]:
    return tuple(f"·t{i}" for i in range(count))


@pytest.fixture(scope="module")
def explanation():
    return made_up_explanation()


@pytest.fixture(scope="module")
def path(explanation, tmp_path_factory) -> Path:
    page = explain_page(explanation, recipe="cw-lens explain --text '</script>'")
    return page.save(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def page(chromium, path):
    with opened(chromium, path) as page:
        yield page
        assert page.complaints == []


def truth(layer, metric):
    """One layer's edges of a metric, as an array of [head, query, key]."""
    edges = {
        "attention": lambda: layer.pattern,
        "value_weighted": lambda: layer.pattern * layer.projected_value_norm[:, :, None],
        "contribution": lambda: inter_head_contributions(layer).abs(),
        "intra_head_contribution": lambda: intra_head_contributions(layer),
        "signed_contribution": lambda: inter_head_contributions(layer),
    }[metric]()
    return edges[0].numpy()


def most(edges):
    """What 99 % of the magnitudes stay within."""
    return np.sort(np.abs(edges))[int(np.ceil(0.99 * edges.size)) - 1]


def visible(edges):
    rows, columns = np.tril_indices(edges.shape[-1])
    return edges[..., rows, columns]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_is_drawn_in_silence(chromium, path, theme, width):
    with opened(chromium, path, theme=theme, width=width) as page:
        assert len(page.plots("maps")) == 11
        page.show_heads(HEADS)
        assert len(page.plots("factors")) == 4
        for section in SECTIONS:
            page.show(section)
        page.settle()
        assert page.complaints == []
        assert page.requests == [path.as_uri()]
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_tokens_are_text_everywhere(page):
    expected = list(HOSTILE)
    for line in ("attention", "lower"):
        spans = page.tab.locator(f"#line-{line} .token")
        assert spans.all_text_contents() == expected
        assert page.tab.locator(f"#line-{line} .token *").count() == 0
    assert page.tab.locator("img, b script").count() == 0
    ticks = page.plots("factors")[0]["ticks"]
    # plotly lays texts out as SVG, where a line separator is no mark of its own
    shown = [t if len(t) <= 12 else f"{t[:11]}…" for t in expected if t != "\u2028"]
    assert [tick for tick in ticks if tick.strip("\u2028\u200b ")] == shown
    table = page.tab.locator("#token-table").text_content()
    assert "\n1\t101\t</script>\n" in table
    assert page.tab.locator("#recipe pre").text_content() == "cw-lens explain --text '</script>'"
    assert "made-up</script><b>" in page.tab.title()


def test_the_head_grid_shows_the_edges_with_their_sign(page, explanation):
    page.show_heads(HEADS)
    layer = explanation.layers[0]
    edges = truth(layer, "signed_contribution")
    top = float(page.tab.locator("#grid-bar .bar").get_attribute("data-top"))
    pooled = np.concatenate(
        [visible(truth(x, "signed_contribution")).ravel() for x in explanation.layers]
    )
    assert top == pytest.approx(most(pooled), rel=1e-3)
    seen = {"negative": 0, "positive": 0, "zero": 0}
    for head in range(HEADS):
        cells = np.array(page.tab.evaluate(CELLS, [head, len(HOSTILE)]))
        red, _, blue = np.moveaxis(cells, -1, 0)
        lower = np.tril(np.ones(cells.shape[:2], dtype=bool))
        for name, where, colour in (
            ("negative", edges[head] <= -top, NEGATIVE),
            ("positive", edges[head] >= top, POSITIVE),
            ("zero", np.abs(edges[head]) < top / 200, WHITE),
        ):
            assert (np.abs(cells[where & lower] - colour) <= 4).all(), name
            seen[name] += (where & lower).sum()
        assert (red > blue)[lower & (edges[head] < -top / 20)].all()
        assert (blue > red)[lower & (edges[head] > top / 20)].all()
    assert (edges < -top / 20).any()
    assert seen["positive"]
    assert seen["zero"]


def test_the_switches_of_the_head_grid_redraw_it(page, explanation):
    page.show_heads(HEADS)
    seen = {tuple(page.tab.evaluate(GRID_PIXELS))}
    ranges = set()
    for metric in ("attention", "value_weighted", "contribution", "intra_head_contribution"):
        page.tab.locator(f"#grid-controls input[value={metric}]").check(force=True)
        page.settle()
        seen.add(tuple(page.tab.evaluate(GRID_PIXELS)))
        top = float(page.tab.locator("#grid-bar .bar").get_attribute("data-top"))
        pooled = np.concatenate([visible(truth(x, metric)).ravel() for x in explanation.layers])
        assert top == pytest.approx(most(pooled), rel=1e-3)
        ranges.add(top)
        page.tab.get_by_label("Colour range").select_option("largest")
        page.settle()
        top = float(page.tab.locator("#grid-bar .bar").get_attribute("data-top"))
        assert top == pytest.approx(np.abs(pooled).max(), rel=1e-3)
        page.tab.get_by_label("Colour range").select_option("most")
    page.tab.locator("#grid-controls input[type=range]").fill("1")
    page.settle()
    seen.add(tuple(page.tab.evaluate(GRID_PIXELS)))
    assert len(seen) == 6
    assert len(ranges) == 4
    names = page.tab.locator("#head-grid .head > span").all_text_contents()
    assert names == ["L2 mean", *(f"L2 H{h}" for h in range(4))]
    assert page.tab.locator(".slider output").text_content() == "layer 2"
    assert page.tab.locator("#head-grid canvas").count() == HEADS + 1


def test_a_clicked_head_stays_enlarged_when_the_metric_changes(page, explanation):
    page.show_heads(HEADS)
    page.tab.locator("#head-grid [data-head='2']").click()
    page.tab.mouse.move(0, 0)
    page.tab.locator("#grid-controls input[value=attention]").check(force=True)
    page.settle()
    assert page.tab.locator("#large-name").text_content() == "L0 H2 · attention  α"
    chosen = page.tab.locator("#head-grid [aria-pressed=true]")
    assert chosen.get_attribute("data-head") == "2"
    drawn = np.array(page.large(), dtype=float)
    np.testing.assert_allclose(
        visible(drawn), visible(explanation.layers[0].pattern[0, 2].numpy()), atol=1e-4
    )


def test_the_factors_multiply_to_the_contribution_shown(page, explanation):
    page.plots("factors")
    for place, layer in enumerate(explanation.layers):
        page.tab.locator("#factor-controls select").first.select_option(str(place))
        for head in (0, 3):
            page.tab.locator("#factor-controls select").nth(1).select_option(str(head))
            page.settle()
            plots = page.plots("factors")
            shown = [np.array(plot["z"], dtype=float) for plot in plots]
            factors = decompose(layer)
            expected = [
                factors.attention,
                factors.relative_norm,
                factors.cosine,
                inter_head_contributions(layer),
            ]
            for drawn, exact in zip(shown, expected, strict=True):
                edges = visible(exact[0, head].numpy())
                unit = np.abs(edges).max() * 10 / 32767
                np.testing.assert_allclose(visible(drawn), edges, atol=unit)
                assert np.isnan(drawn[np.triu_indices(len(HOSTILE), 1)]).all()
            np.testing.assert_allclose(
                visible(shown[0] * shown[1] * shown[2]), visible(shown[3]), atol=1e-3
            )
            assert (plots[2]["bottom"], plots[2]["top"]) == (-1, 1)
            assert plots[3]["bottom"] == -plots[3]["top"]


@pytest.mark.parametrize("width", [1280, 390])
def test_each_colour_bar_prints_both_of_its_ends(chromium, tmp_path, width):
    explanation = made_up_explanation(words(40), heads=24, layers=1, chosen=(0,))
    path = explain_page(explanation).save(tmp_path / "bars.html")
    with opened(chromium, path, width=width) as page:
        bars = [plot["bar"] for plot in page.plots("factors")]
    assert [len(bar) for bar in bars] == [3, 3, 3, 3]
    assert bars[3][0] == f"−{bars[3][2]}"


@pytest.mark.parametrize(("width", "named"), [(1280, True), (390, False)])
def test_tokens_are_named_along_a_map_only_where_there_is_room(chromium, tmp_path, width, named):
    explanation = made_up_explanation(words(16), heads=2, layers=1, chosen=(0,))
    path = explain_page(explanation).save(tmp_path / "room.html")
    with opened(chromium, path, width=width) as page:
        ticks = page.plots("factors")[0]["ticks"]
        assert all(tick.isdigit() for tick in ticks) != named
        assert page.tab.evaluate(
            "() => { const boxes = [...document.querySelectorAll('#factor-attention .ytick text')]"
            ".map((t) => t.getBoundingClientRect()).sort((a, b) => a.top - b.top);"
            " return boxes.every((b, at) => !at || b.top > boxes[at - 1].top + b.height / 2); }"
        )


def test_words_of_tables_stay_whole_on_a_phone(chromium, path):
    with opened(chromium, path, width=390) as page:
        page.tab.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        heights = page.tab.evaluate(
            "[...document.querySelectorAll('#certificates td')].map((t) => t.offsetHeight)"
        )
        assert max(heights) < 32
        assert page.tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_maps_show_the_profile_and_open_a_head(page, explanation):
    plots = {plot["name"].removeprefix("map-"): plot for plot in page.plots("maps")}
    for name, plot in plots.items():
        exact = getattr(explanation.heads, name).numpy()
        np.testing.assert_allclose(np.array(plot["z"]).T, exact, rtol=1e-5)
        assert plot["top"] >= np.abs(exact).max() * 0.999
        assert len(plot["bar"]) == 3
    for signed, unsigned in (("first_contribution", "first_value_weighted"), ("net", "gross")):
        assert plots[signed]["bottom"] == -plots[signed]["top"]
        assert plots[signed]["top"] == plots[unsigned]["top"]
        assert plots[unsigned]["bottom"] == 0
    page.plots("factors")
    for x, y, expected in ((2, 3, ("1", "3")), (1, 0, ("1", "3")), (0, 1, ("0", "1"))):
        page.tab.evaluate(
            "([x, y]) => document.getElementById('map-net').emit('plotly_click',"
            " { points: [{ x, y }] })",
            [x, y],
        )
        values = [box.input_value() for box in page.tab.locator("#factor-controls select").all()]
        assert tuple(values) == expected


def test_the_text_is_coloured_by_shares_of_its_line(chromium, tmp_path):
    explanation = made_up_explanation()
    scores = explanation.scores
    signs = torch.ones(len(HOSTILE))
    signs[3::4] = -1
    values = {**scores.values, "signed_contribution": scores["signed_contribution"] * signs}
    explanation = replace(explanation, scores=replace(scores, values=values))
    path = explain_page(explanation).save(tmp_path / "text.html")
    with opened(chromium, path) as page:
        _check_text(page, explanation)
        assert page.complaints == []


def _check_text(page, explanation):
    def depths(line):
        fills = page.tab.evaluate(
            "id => [...document.querySelectorAll(`#${id} .token`)].map("
            "(t) => t.style.getPropertyValue('--fill'))",
            f"line-{line}",
        )
        size = np.array([float(fill.split(") ")[1].split("%")[0]) / 100 for fill in fills])
        return np.where(["negative" in fill for fill in fills], -size, size)

    def shares(metric, row=None):
        score = explanation.scores[metric][0].mean(dim=1)
        score = (score.mean(dim=0) if row is None else score[row]).numpy()
        return score / np.abs(score).sum()

    def expected(metric, row=None, linear=False):
        lines = shares("attention", row), shares(metric, row)
        start = 1 if linear else 0
        top = max(np.abs(line[start:]).max() for line in lines)
        parts = [np.clip(line / top, -1, 1) for line in lines]
        return parts if linear else [np.sign(p) * np.sqrt(np.abs(p)) for p in parts]

    def check(*arguments, **options):
        for line, exact in zip(
            ("attention", "lower"), expected(*arguments, **options), strict=True
        ):
            np.testing.assert_allclose(depths(line), exact, atol=2e-2)

    controls = page.tab.locator("#text-controls select")
    check("contribution")
    controls.nth(1).select_option("signed_contribution")
    check("signed_contribution")
    assert (depths("lower") < 0).any()
    controls.nth(0).select_option("1")
    check("signed_contribution", 1)
    controls.nth(2).select_option("linear")
    check("signed_contribution", 1, linear=True)
    sinks = explanation.sinks[1].nonzero().flatten().tolist()
    marked = page.tab.locator("#line-attention .token.sink").all()
    assert [int(token.get_attribute("data-token")) for token in marked] == sinks


def test_a_token_tells_its_numbers_under_mouse_and_keys(page, explanation):
    page.tab.locator("#line-lower .token").nth(2).hover()
    readout = page.tab.locator("#text-readout")
    assert readout.locator("bdi").text_content() == "<b>x"
    assert "position 2 · id 102" in readout.text_content()
    score = explanation.scores["contribution"][0].mean(dim=(0, 1))[2].item()
    assert f"score {float(f'{score:.3g}')}" in readout.text_content()
    page.tab.mouse.move(0, 0)  # or it hovers over another token when the line scrolls
    page.tab.locator("#line-lower").focus()
    page.tab.keyboard.press("ArrowRight")
    assert "position 3 · id 103" in readout.text_content()
    assert page.tab.locator(".token.here").count() == 2


def test_plots_follow_the_theme(page):
    page.plots("maps")
    colour = "document.getElementById('map-net').layout.font.color"
    light = page.tab.evaluate(colour)
    page.tab.emulate_media(color_scheme="dark")
    page.settle()
    assert page.tab.evaluate(colour) != light


def test_what_was_left_out_is_said_where_it_matters(chromium, tmp_path):
    explanation = made_up_explanation(words(60), heads=8)
    whole = explain_page(explanation)
    cut = explain_page(explanation, size_budget=whole.estimated_bytes - 230e3)
    assert cut.omissions
    with opened(chromium, cut.save(tmp_path / "cut.html")) as page:
        for box in page.tab.locator("#omissions, .omitted").all():
            assert box.is_visible()
            for sentence in cut.omissions:
                assert sentence in box.text_content()
        layer, heads = next(iter(_held(cut).items()))
        page.show_heads(len(heads))
        names = page.tab.locator("#head-grid .head > span").all_text_contents()
        assert names == [
            f"L{layer} mean of {len(heads)} of 8 heads",
            *(f"L{layer} H{head}" for head in heads),
        ]
        assert page.complaints == []


def _held(page):
    from tests.test_views import data_of

    return {layer["index"]: layer["heads"] for layer in data_of(page)["prompts"][0]["layers"]}


@pytest.mark.slow
def test_many_heads_and_tokens_are_drawn_a_set_at_a_time(chromium, tmp_path):
    explanation = made_up_explanation(words(60), layers=1, heads=20, chosen=(0,))
    path = explain_page(explanation).save(tmp_path / "many.html")
    with opened(chromium, path) as page:
        page.show_heads(20)
        labels = page.tab.get_by_label("Tokens drawn").locator("option").all_text_contents()
        assert labels == [
            "the 44 with most contribution",
            "first, and 1 to 43",
            "first, and 44 to 59",
        ]
        page.tab.get_by_label("Tokens drawn").select_option("2")
        page.settle()
        edges = truth(explanation.layers[0], "signed_contribution")
        top = float(page.tab.locator("#grid-bar .bar").get_attribute("data-top"))
        strongest = edges[:, 44:, 0]
        head, row = np.unravel_index(strongest.argmax(), strongest.shape)
        colour = page.tab.evaluate(CELLS, [int(head), 17])[row + 1][0]
        if strongest.max() >= top:
            assert np.abs(np.array(colour) - POSITIVE).max() <= 3
        assert colour[2] > colour[0]
        assert page.complaints == []


def test_a_long_text_is_shown_part_by_part(chromium, tmp_path):
    explanation = made_up_explanation(words(2100), layers=1, heads=1, chosen=())
    path = explain_page(explanation).save(tmp_path / "long.html")
    with opened(chromium, path) as page:
        assert page.tab.locator("#line-lower .token").count() == 2000
        assert "Tokens 0 to 1999 of 2100" in page.tab.locator("#text-more").text_content()
        page.tab.locator("#text-more button").click()
        assert page.tab.locator("#line-lower .token").count() == 2100
        assert not page.tab.locator("#text-more").is_visible()
        assert page.tab.locator("#grid-section").count() == 0
        assert page.complaints == []


def test_one_token_draws_every_view(chromium, tmp_path):
    path = explain_page(made_up_explanation(words(1))).save(tmp_path / "one.html")
    with opened(chromium, path) as page:
        assert len(page.plots("maps")) == 11
        page.show("grid-section")
        page.settle()
        assert page.tab.locator("#head-grid canvas").count() == HEADS + 1
        assert page.plots("factors")[0]["z"] == [[1]]
        assert page.complaints == []


def test_a_bidirectional_head_shows_what_comes_later(chromium, tmp_path):
    explanation = made_up_explanation(words(6), causal=False)
    with opened(chromium, explain_page(explanation).save(tmp_path / "both.html")) as page:
        layer = explanation.layers[0]
        page.tab.locator("#factor-controls select").nth(1).select_option("0")
        drawn = np.array(page.plots("factors")[0]["z"], dtype=float)
        np.testing.assert_allclose(drawn, layer.pattern[0, 0].numpy(), atol=1e-4)
        assert torch.isfinite(torch.tensor(drawn)).all()
        page.show_heads(HEADS)
        assert page.complaints == []


def test_a_gated_layer_shows_lengths_as_each_query_sees_them(chromium, tmp_path):
    explanation = made_up_explanation(words(6), gated=True)
    with opened(chromium, explain_page(explanation).save(tmp_path / "gated.html")) as page:
        truth = decompose(explanation.layers[0])
        page.tab.locator("#factor-controls select").nth(1).select_option("0")
        drawn = {plot["name"]: plot["z"] for plot in page.plots("factors")}
        (name,) = [name for name in drawn if "norm" in name]
        lengths = np.tril(np.array(drawn[name], dtype=float))
        expected = truth.relative_norm[0, 0].tril().numpy()
        np.testing.assert_allclose(lengths, expected, atol=1e-3 * expected.max())
        assert page.complaints == []


def test_the_page_works_in_a_notebook_frame(chromium, explanation, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{explain_page(explanation)._repr_html_()}")
    with opened(chromium, path) as page:
        frame = page.tab.frame_locator("iframe")
        frame.locator("html[data-state=ready]").wait_for(state="attached")
        assert "The first token" in frame.locator("#verdict").text_content()
        frame.locator("#factors").scroll_into_view_if_needed()
        frame.locator("#factors .hm image").first.wait_for(state="attached")
        assert page.complaints == []
