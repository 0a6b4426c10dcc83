"""Figures of removal curves, and their files."""

import json
import os
import stat
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from cw_lens.figures import curve_figures, files, write_figures
from cw_lens.figures.curves import _log_ticks
from cw_lens.figures.style import OTHER_STYLES, STYLES, plain, series_styles
from cw_lens.metrics import METRICS
from cw_lens.studies.curves import removal_curves
from tests.browser import opened
from tests.units import FRACTIONS, STRENGTHS, made_up_units

pytestmark = pytest.mark.apart

HOSTILE = "</script><b>x</b> $a$ %{x} &amp;"
FEW = {"resamples": 50}


@pytest.fixture(scope="module")
def curves():
    return removal_curves(made_up_units(STRENGTHS | {HOSTILE: 1.5}), **FEW)


@pytest.fixture(scope="module")
def figures(curves):
    return curve_figures(curves, recipe="cw-lens faithfulness")


def drawn_series(figure):
    return {trace.name: trace for trace in figure.data if trace.marker.symbol is not None}


def test_there_is_one_figure_per_direction_and_one_of_the_areas(figures):
    assert list(figures) == [
        "texts-layer-cosine-comprehensiveness",
        "texts-layer-cosine-sufficiency",
        "texts-layer-cosine-aopc",
    ]
    for figure in figures.values():
        assert figure.layout.meta["recipe"] == "cw-lens faithfulness"


def test_points_and_bars_are_those_of_the_table(curves, figures):
    for remove, name in (("highest", "comprehensiveness"), ("lowest", "sufficiency")):
        series = drawn_series(figures[f"texts-layer-cosine-{name}"])
        assert set(series) == {plain(metric) for metric in (*STRENGTHS, HOSTILE)}
        for metric in (*STRENGTHS, HOSTILE):
            rows = curves.points[
                (curves.points["metric"] == metric) & (curves.points["remove"] == remove)
            ]
            trace = series[plain(metric)]
            assert trace.x == tuple(FRACTIONS)
            assert trace.y == tuple(rows["perplexity"])
            ends = np.array(trace.y) + np.array(trace.error_y.array)
            np.testing.assert_allclose(
                ends, rows["clean_perplexity"] + rows["delta_perplexity_high"], rtol=1e-12
            )
            ends = np.array(trace.y) - np.array(trace.error_y.arrayminus)
            np.testing.assert_allclose(
                ends, rows["clean_perplexity"] + rows["delta_perplexity_low"], rtol=1e-12
            )
            for text, row in zip(trace.hovertext, rows.to_dict("records"), strict=True):
                assert f"change {row['delta_perplexity']:.3g} [" in text
                assert f"{row['top1_agreement']:.1%}" in text


def test_the_clean_perplexity_is_a_dashed_line(curves, figures):
    clean = [t for t in figures["texts-layer-cosine-sufficiency"].data if t.mode == "lines"]
    assert len(clean) == 1
    assert set(clean[0].y) == {curves.points["clean_perplexity"].median()}
    assert clean[0].line.dash == "dash"


def test_areas_are_ranked_and_hold_their_intervals(curves, figures):
    figure = figures["texts-layer-cosine-aopc"]
    highest = [trace for trace in figure.data if trace.xaxis == "x"]
    by_height = sorted(highest, key=lambda trace: trace.y[0])
    assert [trace.x[0] for trace in by_height] == sorted(trace.x[0] for trace in highest)
    assert len(figure.data) == 2 * (len(STRENGTHS) + 1)
    for trace in highest:
        row = curves.aopc[curves.aopc["series"].map(plain) == trace.name].iloc[0]
        assert trace.x[0] == row["aopc"]
        assert trace.x[0] + trace.error_x.array[0] == pytest.approx(row["aopc_high"])
        assert trace.x[0] - trace.error_x.arrayminus[0] == pytest.approx(row["aopc_low"])


def test_captions_say_what_is_shown(curves, figures):
    caption = figures["texts-layer-cosine-comprehensiveness"].layout.meta["caption"]
    predicted = curves.points["predicted"].iloc[0]
    assert "the highest-ranked pairs were removed; texts, layer granularity, sinks" in caption
    assert f"12 texts, {predicted:,} predicted tokens." in caption
    assert "Mean loss of 3 seeds: random." in caption
    assert caption.endswith("Compare figure 3 of the paper (arXiv 2606.07604).")
    assert "figure 4 of" in figures["texts-layer-cosine-sufficiency"].layout.meta["caption"]
    area = figures["texts-layer-cosine-aopc"].layout.meta["caption"]
    assert "Mean over 4 fractions and 12 texts" in area
    assert "nats per predicted token" in area
    assert "Bars: 95 % bootstrap intervals" in caption
    wide = removal_curves(made_up_units({"a": 1.0}), confidence=0.99, **FEW)
    for figure in curve_figures(wide).values():
        assert "Bars: 99 % bootstrap intervals" in figure.layout.meta["caption"]


@pytest.mark.parametrize(
    ("granularity", "protected", "number"),
    [("layer", "none", 8), ("global", "cosine", 9), ("head", "cosine", 10), ("head", "none", None)],
)
def test_captions_name_the_figure_of_the_paper(granularity, protected, number):
    units = made_up_units({"a": 1.0}, granularities=(granularity,), protected=(protected,))
    units.loc[units["example"] == 3, "nll_sum"] = np.nan
    first = next(iter(curve_figures(removal_curves(units, **FEW)).values()))
    caption = first.layout.meta["caption"]
    assert (f"figure {number} of the paper" in caption) == (number is not None)
    assert "4 units without a finite loss are left out." in caption
    assert "11 texts" in caption


def test_the_axis_is_logarithmic_only_where_it_spans_much():
    narrow, wide = (
        next(iter(curve_figures(removal_curves(made_up_units({"a": size}), **FEW)).values()))
        for size in (0.2, 6.0)
    )
    assert narrow.layout.yaxis.type is None
    assert wide.layout.yaxis.type == "log"
    low, high = (10**end for end in wide.layout.yaxis.range)
    trace = drawn_series(wide)["a"]
    assert low < min(np.array(trace.y) - trace.error_y.arrayminus)
    assert high > max(np.array(trace.y) + trace.error_y.array)
    assert all(low <= tick <= high for tick in wide.layout.yaxis.tickvals)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(28.0, 460.0, [50, 100, 200]), (30.0, 2e5, [100, 1e3, 1e5]), (1.0, 1e17, [1e2, 1e6])],
)
def test_ticks_of_a_logarithmic_axis(low, high, expected):
    ticks = _log_ticks(low, high)
    assert set(expected) <= set(ticks)
    assert 3 <= len(ticks) <= 10


def test_every_shipped_metric_has_a_style_of_its_own():
    assert set(STYLES) == set(METRICS)
    assert len(set(STYLES.values()) | set(OTHER_STYLES)) == len(STYLES) + len(OTHER_STYLES)
    own = [f"mine{place}" for place in range(7)]
    styles = series_styles([(name, name, "online") for name in own])
    assert [styles[name] for name in own] == [*OTHER_STYLES, *OTHER_STYLES[:2]]
    two = series_styles(
        [("random (clean)", "random", "clean"), ("random (online)", "random", "online")]
    )
    assert two["random (clean)"] != two["random (online)"] == STYLES["random"]


def test_names_are_fit_for_files_and_do_not_collide():
    units = made_up_units({"a": 1.0}, data=("../a b.jsonl", "..\\a b.jsonl"), examples=2)
    names = list(curve_figures(removal_curves(units, **FEW)))
    assert names[0] == "a-b.jsonl-layer-cosine-comprehensiveness"
    assert names[3] == "a-b.jsonl-layer-cosine-comprehensiveness-2"
    assert len(names) == 6


@pytest.fixture
def no_browser(monkeypatch):
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", "")


def pages(figures):
    return sorted(f"{name}.html" for name in figures)


def test_pages_are_written_without_a_browser(tmp_path, figures, no_browser):
    written = write_figures(tmp_path / "new", figures, recipe="other </script>")
    assert sorted(path.name for path in written.paths) == pages(figures)
    assert sorted(os.listdir(tmp_path / "new")) == sorted([*pages(figures), "plotly.min.js"])
    assert "there is no chromium or chrome on the PATH" in written.message
    assert figures["texts-layer-cosine-aopc"].layout.meta["recipe"] == "other </script>"
    assert figures["texts-layer-cosine-aopc"].layout.meta["caption"]
    text = written.paths[0].read_text()
    assert "https://" not in text


def test_without_kaleido_the_message_says_how_to_get_it(tmp_path, figures, monkeypatch):
    monkeypatch.setitem(sys.modules, "kaleido", None)
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    written = write_figures(tmp_path, figures)
    assert written.message == (
        "Figures are in figures/ as pages. To have them as PNG and SVG too: "
        "pip install 'cw-lens[figures]'."
    )


def test_nothing_to_write_is_no_failure(tmp_path):
    assert write_figures(tmp_path, {}) == files.WrittenFigures((), None)


@pytest.mark.parametrize("kind", ["missing", "ends at once", "talks nonsense", "hangs"])
def test_a_broken_browser_gives_a_message(tmp_path, figures, monkeypatch, capfd, kind):
    browser = tmp_path / "browser"
    script = {"ends at once": "exit 1", "talks nonsense": "echo no", "hangs": "sleep 600"}
    if kind != "missing":
        browser.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n{script[kind]}\n")
        browser.chmod(browser.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("BROWSER_PATH", str(browser))
    monkeypatch.setattr(files, "START_SECONDS", 4.0)
    start = time.monotonic()
    written = write_figures(tmp_path / "out", figures)
    assert time.monotonic() - start < 25
    assert written.message.startswith(f"No PNG and SVG were drawn: {browser} failed (")
    assert "set BROWSER_PATH to a browser that works" in written.message
    assert "\n" not in written.message
    assert sorted(path.name for path in written.paths) == pages(figures)
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*pages(figures), "plotly.min.js"])
    assert capfd.readouterr() == ("", "")
    if kind == "hangs":
        pids = (tmp_path / "pids").read_text().split()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline, "the hanging browser was left behind"
            time.sleep(0.1)


@pytest.mark.browser
def test_images_are_drawn_through_a_browser(tmp_path, figures, chromium, monkeypatch):
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    name = "texts-layer-cosine-sufficiency"
    written = write_figures(tmp_path, {name: figures[name]})
    assert written.message is None
    assert [path.name for path in written.paths] == [f"{name}.{e}" for e in ("html", "png", "svg")]
    png = written.paths[1].read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))
    assert (width, height) == (2 * figures[name].layout.width, 2 * figures[name].layout.height)
    svg = ElementTree.parse(written.paths[2])
    texts = ["".join(node.itertext()) for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {HOSTILE, *STRENGTHS} <= set(texts)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.browser
def test_a_page_draws_what_the_figure_holds(tmp_path, figures, chromium, no_browser):
    written = write_figures(tmp_path, figures)
    path = next(path for path in written.paths if "comprehensiveness" in path.name)
    with opened(chromium, path) as page:
        page.tab.wait_for_selector(".scatterlayer .point")
        assert page.tab.locator(".scatterlayer .trace").count() == len(STRENGTHS) + 2
        points = page.tab.locator(".scatterlayer .point").count()
        assert points == len(FRACTIONS) * (len(STRENGTHS) + 1)
        assert page.tab.locator(".scatterlayer .errorbar").count() == points
        names = page.tab.locator(".legendtext").all_text_contents()
        assert HOSTILE in names
        assert page.tab.locator(".legendtext b").count() == 0
        assert json.dumps(page.complaints) == "[]"
        here = [path.as_uri(), (tmp_path / "plotly.min.js").as_uri()]
        assert sorted(page.requests) == sorted(here)
        # no two names overlap, and none leaves the picture
        boxes = page.tab.evaluate(
            "[...document.querySelectorAll('.legendtext, .xtick, .ytick, .xtitle, .ytitle,"
            " .gtitle')].map((node) => { const box = node.getBoundingClientRect();"
            " return [node.textContent, box.left, box.top, box.right, box.bottom]; })"
        )
        frame = page.tab.locator(".main-svg").first.bounding_box()
    for place, (text, left, top, right, bottom) in enumerate(boxes):
        assert left >= frame["x"] and right <= frame["x"] + frame["width"], text
        assert top >= frame["y"] and bottom <= frame["y"] + frame["height"], text
        for other, x0, y0, x1, y1 in boxes[:place]:
            apart = right <= x0 or x1 <= left or bottom <= y0 + 1 or y1 <= top + 1
            assert apart, (text, other)
