"""Notebook 01 in a real JupyterLab, and as nbconvert's page: its views draw, with no network."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

import cw_lens
from cw_lens.views.libraries import LIBRARIES, packed_library
from tests.browser import Opened
from tests.test_views_browser import GRID_PIXELS, visible

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "01_first_look.ipynb"
MOST_BYTES = 10_000_000
START_S, RUN_S = 180, 900
"""How long a server may take to start and a notebook to run, where other programs run beside."""
FRAMES = 'iframe[title="cw_lens"]'
VIEWS = ["show_overview", "show_tokens", "show_heads", "explain_page"]
"""The functions whose views the notebook shows, from top to bottom."""
NBCONVERT_ASKS = "https://cdnjs.cloudflare.com/ajax/libs/"  # its template: require.js and MathJax
HAS_RUN = """cells => {
  const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')];
  const said = prompts.map((prompt) => prompt.textContent);
  const { status } = document.querySelector('.jp-Notebook-ExecutionIndicator').dataset;
  return status === 'idle' && said.length === cells && said.every((x) => /^\\[\\d+\\]:$/.test(x));
}"""


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: where it answers, the folder that it shows, what its programs get."""

    address: str
    token: str
    folder: Path
    environment: dict[str, str]

    def page(self, name: str, mode: str = "lab") -> str:
        return f"{self.address}{mode}/tree/{name}?token={self.token}"


@pytest.fixture
def lab(tmp_path) -> Iterator[Lab]:
    """JupyterLab as this Python has it: none of the user's settings, no news, no extensions."""
    folder, log = tmp_path / "files", tmp_path / "log.txt"
    folder.mkdir()
    settings = tmp_path / "config/lab/user-settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel named python3 is this Python's
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "OMP_NUM_THREADS": "1",  # another worker has the other core
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *("--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder}"),
        *("--LabApp.extension_manager=readonly", "--LabApp.news_url=None"),
    ]
    with log.open("w") as said:
        server = subprocess.Popen(
            command, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            found = answering(server, tmp_path / "runtime")
            if found is None:
                pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")
            yield Lab(found["url"], found["token"], folder, environment)
        finally:
            server.terminate()  # it ends its kernels, which are in groups of their own
            try:
                server.wait(timeout=60)
            finally:
                end_group(server.pid)


def answering(server: subprocess.Popen, runtime: Path) -> dict | None:
    """What a started server wrote down about itself; None if it ended, or is too slow."""
    late = time.monotonic() + START_S
    while time.monotonic() < late and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            try:
                return json.loads(path.read_text())
            except json.JSONDecodeError:  # still being written
                continue
        time.sleep(0.2)
    return None


def end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@contextmanager
def browsing(browser: Any, allowed: str) -> Iterator[Opened]:
    """An empty page which may ask for what is below `allowed`: the rest is refused and noted."""
    context = browser.new_context(viewport={"width": 1400, "height": 1100})
    page = Opened(context.new_page())

    def refuse(route):
        page.requests.append(route.request.url)
        route.abort()

    def hear(message):
        if message.type == "error" and message.location["url"] not in page.requests:
            page.complaints.append(message.text)

    context.route(lambda address: not address.startswith(allowed), refuse)
    page.tab.on("console", hear)
    page.tab.on("pageerror", lambda error: page.complaints.append(str(error)))
    yield page
    context.close()


def run_all(page: Opened, lab: Lab, name: str) -> None:
    """Opens a notebook, runs it as a reader does, by the menu, and waits for its last cell."""
    cells = sum(x.cell_type == "code" for x in nbformat.read(lab.folder / name, 4).cells)
    with page.tab.expect_websocket(lambda x: "/channels" in x.url, timeout=START_S * 1e3) as kernel:
        page.tab.goto(lab.page(name))
    kernel.value.wait_for_event("framereceived")
    page.tab.get_by_text("| Idle").wait_for(timeout=START_S * 1e3)
    page.tab.get_by_role("menuitem", name="Run", exact=True).click()
    page.tab.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.tab.wait_for_function(HAS_RUN, arg=cells, timeout=RUN_S * 1e3)


def save(page: Opened, name: str) -> None:
    """Saves the notebook by its key; a click first, for keys go to the view clicked last."""

    def saved(answer):
        return answer.request.method == "PUT" and f"/api/contents/{name}" in answer.url

    page.tab.locator(".lm-DockPanel .lm-TabBar-tab").get_by_text(name).click()
    with page.tab.expect_response(saved) as answer:
        page.tab.keyboard.press("Control+s")
    assert answer.value.ok
    answer.value.finished()


def view(page: Opened, maker: str) -> Opened:
    """The inside of the view that `maker` made, in sight and as tall as what it shows.

    A frame out of sight stands still, and one above that grows moves it: scroll there again.
    """
    frame = page.tab.locator(FRAMES).nth(VIEWS.index(maker))
    inside = Opened(frame.element_handle().content_frame())
    late = time.monotonic() + START_S
    while True:
        frame.evaluate("frame => frame.scrollIntoView({ block: 'start' })")
        page.tab.wait_for_timeout(500)
        page_height, frame_height, ready = inside.tab.evaluate(
            "[document.documentElement.offsetHeight, innerHeight,"
            " document.documentElement.dataset.state === 'ready']"
        )
        if ready and 0 <= frame_height - page_height <= 2:
            break
        assert time.monotonic() < late, (maker, page_height, frame_height, ready)
    assert inside.tab.locator("#waiting").is_hidden()
    return inside


def lower(edges) -> np.ndarray:
    return visible(np.array(edges, dtype=float))


def check_views(page: Opened, run: Any) -> None:
    """Each view of the notebook is drawn, from the numbers of the run, and heeds the mouse."""
    last = page.tab.locator(FRAMES).nth(len(VIEWS) - 1)  # cells come one after another
    last.wait_for(state="attached", timeout=START_S * 1e3)
    assert page.tab.locator(FRAMES).count() == len(VIEWS)
    for maker in VIEWS:
        view(page, maker)
    heads = view(page, "show_heads")
    heads.show_heads(run.layers[0].pattern.shape[1])
    name = heads.tab.locator("#large-name").text_content()
    layer = run.layers[int(re.match(r"L(\d+) mean · signed contribution", name)[1])]
    signed = cw_lens.inter_head_contributions(layer)[0].numpy()
    np.testing.assert_allclose(lower(heads.large()), lower(signed.mean(0)), atol=1e-3)
    small = heads.tab.evaluate(GRID_PIXELS)
    heads.tab.locator("#grid-controls input[value=attention]").check(force=True)
    heads.settle()
    attention = layer.pattern[0].numpy()
    np.testing.assert_allclose(lower(heads.large()), lower(attention.mean(0)), atol=1e-3)
    assert not set(small) & set(heads.tab.evaluate(GRID_PIXELS))
    heads.tab.locator("#head-grid [data-head='3']").click()
    heads.settle()
    np.testing.assert_allclose(lower(heads.large()), lower(attention[3]), atol=1e-3)

    overview = view(page, "show_overview").plots("maps")
    first = np.array([x.pattern[0, :, :, 0].mean(-1).numpy() for x in run.layers]).T
    drawn = {plot["name"]: plot["z"] for plot in overview}
    np.testing.assert_allclose(drawn["map-first_attention"], first, atol=1e-3)
    for maker in ("show_tokens", "explain_page"):
        shown = view(page, maker).tab.locator("#line-lower .token")
        assert tuple(shown.all_text_contents()) == run.prompts.tokens[0]


def held_once(text: str) -> None:
    for name in LIBRARIES:
        assert text.count(packed_library(name)) == 1, name


@pytest.mark.browser
@pytest.mark.apart
@pytest.mark.golden
@pytest.mark.slow
def test_views_draw_in_jupyterlab_when_run_when_reopened_and_as_a_page(chromium, lab, smollm2):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    path = lab.folder / NOTEBOOK.name
    nbformat.write(notebook, path)
    text = re.search(r'"(The river [^"]+)"', notebook.cells[1].source)[1]
    run = cw_lens.capture(smollm2, cw_lens.tokenize(smollm2, text))

    with browsing(chromium, lab.address) as page:
        run_all(page, lab, path.name)
        check_views(page, run)
        save(page, path.name)
        assert path.stat().st_size < MOST_BYTES
        held_once(path.read_text())
        page.tab.reload()  # from the file: nothing is run again
        check_views(page, run)
        check_untrusted(page, lab, path)
        assert page.requests == []
        assert page.complaints == []
    check_page(chromium, lab, path, run)


def check_untrusted(page: Opened, lab: Lab, path: Path) -> None:
    """A notebook that was not run here: JupyterLab drops scripts and frames, and we say so.

    It trusts what it has signed itself, so another text suffices to make a notebook foreign.
    """
    foreign = nbformat.read(path, as_version=4)
    foreign.cells[0].source = "# From somebody else"
    nbformat.write(foreign, lab.folder / "foreign.ipynb")
    page.tab.goto(lab.page("foreign.ipynb", "doc"))  # by itself: no other tab comes back
    told = page.tab.locator(".jp-OutputArea-output", has_text="Trust the notebook")
    told.nth(len(VIEWS) - 1).wait_for(timeout=START_S * 1e3)
    assert told.count() == len(VIEWS)
    assert page.tab.locator(FRAMES).count() == 0


def check_page(chromium: Any, lab: Lab, path: Path, run: Any) -> None:
    """What nbconvert makes of the saved notebook opens from the disk and draws."""
    command = [sys.executable, "-m", "nbconvert", "--to", "html", str(path)]
    done = subprocess.run(command, env=lab.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page_path = path.with_suffix(".html")
    held_once(page_path.read_text())
    with browsing(chromium, page_path.as_uri()) as page:
        page.tab.goto(page_path.as_uri())
        check_views(page, run)
        assert "Trust the notebook" not in page.tab.locator("body").inner_text()
        assert [x for x in page.requests if not x.startswith(NBCONVERT_ASKS)] == []
        assert page.complaints == []
