"""The page of a study: without a browser, and in Chromium."""

import csv
import io
import json
import re

import numpy as np
import pandas as pd
import pytest

from cw_lens.errors import InputError
from cw_lens.figures import curve_figures
from cw_lens.studies.curves import removal_curves
from cw_lens.views.study_page import Chapter, Section, study_page
from tests.browser import opened
from tests.units import FRACTIONS, made_up_units

pytestmark = pytest.mark.apart

HOSTILE = "</script><b>"
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@pytest.fixture(scope="module")
def curves():
    units = made_up_units({"attention": 1.0, HOSTILE: 2.0, "random": 0.1})
    return removal_curves(units, resamples=50)


@pytest.fixture(scope="module")
def odd_table():
    return pd.DataFrame(
        {
            "name": ["b", HOSTILE, 'a,"q"', "=1\nx"],
            "number": [10.0, 9.1234567890123, np.nan, -2.0],
            "count": [3, 20, 100, 1],
            "mixed": ["x", None, 3, np.inf],
        }
    )


@pytest.fixture(scope="module")
def page(curves, odd_table):
    return study_page(
        Chapter(
            f"Faithfulness {HOSTILE}",
            [
                Section("Curves", curves.sentences, curve_figures(curves, recipe="r")),
                Section(f"Tables {HOSTILE}", (), {}, {"curves": curves.points, HOSTILE: odd_table}),
            ],
            sentences=curves.sentences[:1],
            facts=[("Model", f"tiny {HOSTILE}"), ("Certificate", "2e-7")],
            notices=[f"3 units failed {HOSTILE}"],
            recipe=f"cw-lens faithfulness --metrics '{HOSTILE}'",
        )
    )


def test_nothing_given_is_read_as_markup(page):
    text = DATA.search(page.html)[1]
    assert not set("<>&") & set(text)
    data = json.loads(text)
    (chapter,) = data["chapters"]
    assert chapter["recipe"] == f"cw-lens faithfulness --metrics '{HOSTILE}'"
    assert chapter["facts"][0] == ["Model", f"tiny {HOSTILE}"]
    outside = DATA.sub("", page.html)
    assert len(re.findall('class="library" data-name="plotly-', page.html)) == 1
    assert len(re.findall("</script", page.html)) == 3  # data, plotly, the page's own
    assert "Faithfulness" not in outside
    own = outside[: outside.index("<script>")]
    assert "default-src 'none'" in own
    assert not re.search(r"(?:src|href)\s*=|url\(", own)
    assert page.estimated_bytes == len(page.html.encode()) < 2.5e6


def test_tables_hold_what_json_cannot(page, odd_table):
    stored = json.loads(DATA.search(page.html)[1])["chapters"][0]["sections"][1]["tables"][1]
    name, number, _, mixed = stored["columns"]
    assert [name["levels"][place] for place in name["values"]] == list(odd_table["name"])
    assert number["values"] == [10.0, 9.1234567890123, None, -2.0]
    assert mixed["values"] == ["x", None, 3, "inf"]
    assert stored["file"] == "script-b" and stored["title"] == HOSTILE


def test_an_empty_page_and_two_columns_of_one_name():
    assert '"sections":[]' in study_page(Chapter("nothing")).html.replace(" ", "")
    empty = Section("t", (), {}, {"none": pd.DataFrame({"a": []})})
    assert study_page(Chapter("nothing", [empty])).html
    twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(InputError, match="table 't' has two columns 'a'"):
        study_page(Chapter("x", [Section("h", (), {}, {"t": twice})]))


@pytest.fixture(scope="module")
def path(page, tmp_path_factory):
    return page.save(tmp_path_factory.mktemp("study") / "report.html")


@pytest.fixture
def shown(chromium, path):
    with opened(chromium, path) as shown:
        yield shown
        assert shown.complaints == []
        assert shown.requests[0] == path.as_uri()
        assert all(url.startswith("blob:") for url in shown.requests[1:])


def table(shown, place):
    rows = shown.tab.locator(".table").nth(place).locator("tbody tr").all()
    return [row.locator("td").all_text_contents() for row in rows]


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_everything_is_drawn_in_silence(chromium, path, theme, width):
    with opened(chromium, path, theme=theme, width=width) as shown:
        plots = shown.tab.locator(".plot")
        assert plots.count() == 3
        for place in range(3):
            plots.nth(place).scroll_into_view_if_needed()
            plots.nth(place).locator(".point").first.wait_for()
        points = [plots.nth(place).locator(".scatterlayer .point").count() for place in range(3)]
        assert points == [3 * len(FRACTIONS), 3 * len(FRACTIONS), 2 * 3]
        assert shown.complaints == []
        assert shown.requests == [path.as_uri()]
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= width
        # a text of two lines has the letters of its neighbours
        sizes = shown.tab.evaluate(
            "[...document.querySelectorAll('.plot .line')].map((line) =>"
            " getComputedStyle(line).fontSize === getComputedStyle(line.parentNode).fontSize)"
        )
        assert len(sizes) > 0
        assert all(sizes)


@pytest.mark.browser
def test_hostile_texts_are_text(shown):
    tab = shown.tab
    assert tab.locator("h1").text_content() == f"Faithfulness {HOSTILE}"
    assert tab.title() == f"Faithfulness {HOSTILE}"
    assert tab.locator(".chapter > .notice").text_content() == f"3 units failed {HOSTILE}"
    assert tab.locator("pre.recipe").text_content().endswith(f"--metrics '{HOSTILE}'")
    assert tab.locator(".facts dd").first.text_content() == f"tiny {HOSTILE}"
    assert any(HOSTILE in text for text in tab.locator(".sentences li").all_text_contents())
    tab.locator(".plot").first.scroll_into_view_if_needed()
    tab.locator(".plot .legendtext").first.wait_for()
    assert HOSTILE in tab.locator(".plot").first.locator(".legendtext").all_text_contents()
    assert tab.locator("b").count() == tab.locator(".same b").count() > 0


@pytest.mark.browser
def test_tables_sort_on_click(shown):
    heads = shown.tab.locator(".table").nth(1).locator("th button")
    names = lambda: [row[0] for row in table(shown, 1)]  # noqa: E731
    start = names()
    heads.nth(2).click()
    assert [row[2] for row in table(shown, 1)] == ["1", "3", "20", "100"]
    heads.nth(2).click()
    assert [row[2] for row in table(shown, 1)] == ["100", "20", "3", "1"]
    heads.nth(1).click()
    assert [row[1] for row in table(shown, 1)] == ["−2", "9.123", "10", "–"]
    heads.nth(1).click()
    assert [row[1] for row in table(shown, 1)] == ["10", "9.123", "−2", "–"]
    assert sorted(names()) == sorted(start)
    marks = shown.tab.locator(".table").nth(1).locator("th[aria-sort]")
    assert marks.evaluate_all("all => all.map((th) => th.ariaSort)") == ["descending"]


@pytest.mark.browser
def test_csv_holds_the_numbers_in_full(shown, odd_table, curves):
    def downloaded(place):
        with shown.tab.expect_download() as download:
            shown.tab.locator(".table").nth(place).locator(".download").click()
        text = download.value.path().read_bytes().decode()
        return download.value.suggested_filename, text

    name, text = downloaded(1)
    assert name == "script-b.csv"
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0] == list(odd_table.columns)
    assert [row[0] for row in rows[1:]] == list(odd_table["name"])
    assert [row[1] for row in rows[1:]] == ["10", "9.1234567890123", "", "-2"]
    shown.tab.locator(".table").nth(1).locator("th button").nth(2).click()
    assert [row[2] for row in csv.reader(io.StringIO(downloaded(1)[1]))][1:] == [
        "1",
        "3",
        "20",
        "100",
    ]
    name, text = downloaded(0)
    assert name == "curves.csv"
    pd.testing.assert_frame_equal(
        pd.read_csv(io.StringIO(text), float_precision="round_trip"),
        curves.points,
        check_dtype=False,
        check_exact=True,
    )


@pytest.mark.browser
def test_long_tables_show_their_first_rows_and_then_all(chromium, tmp_path):
    long = pd.DataFrame({"row": range(250)})
    path = study_page(Chapter("long", [Section("s", (), {}, {"long": long})])).save(
        tmp_path / "a.html"
    )
    with opened(chromium, path) as shown:
        assert len(table(shown, 0)) == 15
        shown.tab.locator("th button").click()
        shown.tab.locator("th button").click()
        assert table(shown, 0)[0] == ["249"]
        more = shown.tab.locator("button.more")
        assert more.text_content() == "Show all 250 rows"
        more.click()
        assert [row[0] for row in table(shown, 0)] == [str(row) for row in range(249, -1, -1)]
        frame = shown.tab.locator(".table .scrolls > div")
        assert frame.evaluate("f => f.clientHeight < 0.9 * innerHeight")  # it scrolls by itself
        more.click()
        assert len(table(shown, 0)) == 15
        assert shown.complaints == []


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Thirty rows, twenty numbers with intervals, and what people come for in the last column."""
    rows = 30
    columns = {"data": "texts", "layer": range(rows)}
    for place in range(20):
        value = np.linspace(-1, 1, rows) / 3
        columns[f"number_{place}"] = value
        for end, held in (("low", value - 0.1), ("high", value + 0.1), ("n", 8)):
            columns[f"number_{place}_{end}"] = held
    comparisons = pd.DataFrame(
        {"data": "texts", "granularity": "layer", "metric": ["a", "b"], "other": "c"}
        | {"fraction": 0.5, "difference": [0.1, -0.2], "low": [0.0, -0.3], "high": [0.2, -0.1]}
        | {"n": 12, "verdict": ["better", "worse"]}
    )
    tables = {"number": pd.DataFrame(columns), "comparisons": comparisons}
    page = study_page(Chapter("wide", [Section("s", (), {}, tables)]))
    return page.save(tmp_path_factory.mktemp("wide") / "page.html")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1250, 390])
def test_what_a_wide_table_hides_is_said_and_its_first_column_stays(chromium, wide, width):
    with opened(chromium, wide, width=width) as shown:
        assert shown.tab.evaluate("document.documentElement.scrollWidth") <= width
        block = shown.tab.locator(".table").first
        hint, frame = block.locator(".hint"), block.locator(".scrolls")
        shown.settle()
        hidden = int(hint.text_content().split()[0])
        assert "more columns to the right: scroll" in hint.text_content() and 5 < hidden < 21
        assert "more-right" in frame.get_attribute("class")
        assert "more-left" not in frame.get_attribute("class")
        first = block.locator("tbody td").first
        before = first.bounding_box()["x"]
        frame.locator(".rows").evaluate("rows => rows.scrollTo(1e6, 0)")
        shown.settle()
        assert first.bounding_box()["x"] == pytest.approx(before, abs=1)
        assert first.text_content() == "0"
        assert not hint.is_visible()
        assert "more-left" in frame.get_attribute("class")
        assert "more-right" not in frame.get_attribute("class")
        assert shown.complaints == []


@pytest.mark.browser
def test_intervals_stand_beside_their_number_and_what_is_the_same_is_said_once(chromium, wide):
    with opened(chromium, wide) as shown:
        block = shown.tab.locator(".table").first
        heads = block.locator("th").all_text_contents()
        assert heads == ["layer", *(f"number {place}" for place in range(20))]
        cell = block.locator("tbody tr").first.locator("td").nth(1)
        assert cell.text_content() == "−0.333 [−0.433, −0.233]"
        assert cell.get_attribute("title").startswith("-0.3333333333333333 [-0.43333333")
        assert cell.get_attribute("title").endswith(", n = 8")
        assert block.locator(".same").text_content() == "The same in all rows: data texts."
        # thirty rows are not cut off in silence
        assert len(table(shown, 0)) == 15
        block.locator("button.more").click()
        assert len(table(shown, 0)) == 30
        assert block.locator("button.more").text_content() == "Show the first 15"
        with shown.tab.expect_download() as download:
            block.locator(".download").click()
        names = download.value.path().read_text().splitlines()[0].split(",")
        assert len(names) == 2 + 4 * 20


@pytest.mark.browser
def test_a_known_table_has_a_title_its_verdict_in_sight_and_meanings(chromium, wide):
    with opened(chromium, wide, width=1250) as shown:
        block = shown.tab.locator(".table").nth(1)
        assert block.locator(".table-head h3").text_content() == "Every comparison of two metrics"
        heads = block.locator("th").all_text_contents()
        assert heads == ["metric", "other", "fraction", "verdict", "difference"]
        verdict = block.locator("th").nth(3)
        box = verdict.bounding_box()
        assert box["x"] + box["width"] < 1250
        tip = verdict.locator("button").get_attribute("title")
        assert tip.startswith("whether the first named is better or worse")
        legend = block.locator("details.legend")
        legend.locator("summary").click()
        words = legend.locator("dt").all_text_contents()
        assert words == [*heads, "data", "granularity", "n", "[ , ]"]
        assert legend.locator("dd").nth(3).text_content() == tip
        assert "nats per token" in legend.locator("dd").nth(4).text_content()
