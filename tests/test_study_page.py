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
from cw_lens.views.study_page import Section, study_page
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
        f"Faithfulness {HOSTILE}",
        [
            Section("Curves", curves.sentences, curve_figures(curves, recipe="r")),
            Section(f"Tables {HOSTILE}", (), {}, {"points": curves.points, HOSTILE: odd_table}),
        ],
        sentences=curves.sentences[:1],
        facts=[("Model", f"tiny {HOSTILE}"), ("Certificate", "2e-7")],
        notices=[f"3 units failed {HOSTILE}"],
        recipe=f"cw-lens faithfulness --metrics '{HOSTILE}'",
    )


def test_nothing_given_is_read_as_markup(page):
    text = DATA.search(page.html)[1]
    assert not set("<>&") & set(text)
    data = json.loads(text)
    assert data["recipe"] == f"cw-lens faithfulness --metrics '{HOSTILE}'"
    assert data["facts"][0] == ["Model", f"tiny {HOSTILE}"]
    outside = DATA.sub("", page.html)
    assert page.html.count("plotly.js v") == 1
    assert len(re.findall("</script", page.html)) == 3  # data, plotly, the page's own
    assert "Faithfulness" not in outside
    own = outside[: outside.index("<script>")]
    assert "default-src 'none'" in own
    assert not re.search(r"(?:src|href)\s*=|url\(", own)
    assert page.estimated_bytes == len(page.html.encode()) < 6e6


def test_tables_hold_what_json_cannot(page, odd_table):
    stored = json.loads(DATA.search(page.html)[1])["sections"][1]["tables"][1]
    name, number, _, mixed = stored["columns"]
    assert [name["levels"][place] for place in name["values"]] == list(odd_table["name"])
    assert number["values"] == [10.0, 9.1234567890123, None, -2.0]
    assert mixed["values"] == ["x", None, 3, "inf"]
    assert stored["file"] == "script-b"


def test_an_empty_page_and_two_columns_of_one_name():
    assert '"sections":[]' in study_page("nothing", []).html.replace(" ", "")
    empty = Section("t", (), {}, {"none": pd.DataFrame({"a": []})})
    assert study_page("nothing", [empty]).html
    twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
    with pytest.raises(InputError, match="table 't' has two columns 'a'"):
        study_page("x", [Section("h", (), {}, {"t": twice})])


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
    assert tab.locator("#notices").text_content() == f"3 units failed {HOSTILE}"
    assert tab.locator("#recipe pre").text_content().endswith(f"--metrics '{HOSTILE}'")
    assert tab.locator("#facts dd").first.text_content() == f"tiny {HOSTILE}"
    assert any(HOSTILE in text for text in tab.locator(".sentences li").all_text_contents())
    tab.locator(".plot").first.scroll_into_view_if_needed()
    tab.locator(".plot .legendtext").first.wait_for()
    assert HOSTILE in tab.locator(".plot").first.locator(".legendtext").all_text_contents()
    assert tab.locator("b").count() == 0


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
    assert name == "points.csv"
    pd.testing.assert_frame_equal(
        pd.read_csv(io.StringIO(text), float_precision="round_trip"),
        curves.points,
        check_dtype=False,
        check_exact=True,
    )


@pytest.mark.browser
def test_long_tables_show_their_first_rows_and_then_all(chromium, tmp_path):
    long = pd.DataFrame({"row": range(250)})
    path = study_page("long", [Section("s", (), {}, {"long": long})]).save(tmp_path / "a.html")
    with opened(chromium, path) as shown:
        assert len(table(shown, 0)) == 100
        shown.tab.locator("th button").click()
        shown.tab.locator("th button").click()
        assert table(shown, 0)[0] == ["249"]
        more = shown.tab.locator("button.more")
        assert more.text_content() == "Show all 250 rows"
        more.click()
        assert [row[0] for row in table(shown, 0)] == [str(row) for row in range(249, -1, -1)]
        assert not more.is_visible()
        assert shown.complaints == []
