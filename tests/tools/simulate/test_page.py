"""The page of ``meshmuon plan --html`` in a real browser: it renders, sorts, searches, and shows the numbers of the
JSON.

The browser is Debian's chromium with its driver (``apt-get install chromium chromium-driver``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshmuon.tools.cli.main import main
from tests.support.optional import need

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
in_browser = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="chromium and chromium-driver are not installed"
)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)
COMMAND = (
    "plan --model qwen3-30b-a3b --mesh dp_replicate=2,dp_shard=16,ep=8 --mesh dp_shard=32,ep=8 --mesh "
    "dp_shard=48,ep=48 --hardware h100 --compare"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page and the JSON of one command."""
    folder = tmp_path_factory.mktemp("page")
    page, figures = folder / "report.html", folder / "report.json"
    assert main([*COMMAND.split(), "--html", str(page), "--json", str(figures)]) == 0
    return page, json.loads(figures.read_text())


def test_one_file_without_the_network(written: tuple[Path, dict[str, Any]]) -> None:
    text = written[0].read_text()
    # plotly's own text names addresses that it does not ask
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"'](?!data:|#)", own)
    assert "@import" not in own
    embedded = re.search(r'<script id="report" type="application/json">(.*?)</script>', text, flags=re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1]) == written[1]


def test_a_name_cannot_end_the_script(tmp_path: Path) -> None:
    model = tmp_path / "odd.json"
    assert main(["plan", "--model", "gpt2", "--save-model", str(model)]) == 0
    content = json.loads(model.read_text())
    content["title"] = "</script><script>document.title='taken'</script> & Sons"
    model.write_text(json.dumps(content))
    page = tmp_path / "odd.html"
    assert main(["plan", "--model", str(model), "--mesh", "dp_shard=2", "--hardware", "h100", "--html", str(page)]) == 0
    assert "<script>document.title" not in page.read_text()


def test_without_plotly_nothing_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    figures = tmp_path / "report.json"
    with pytest.raises(SystemExit) as end:
        main(
            [
                "plan",
                "--model",
                "gpt2",
                "--mesh",
                "dp_shard=2",
                "--html",
                str(tmp_path / "p.html"),
                "--json",
                str(figures),
            ]
        )
    assert end.value.code == 2
    assert "--html needs plotly: pip install 'meshmuon[plan]'" in capsys.readouterr().err
    assert not figures.exists()


@pytest.fixture(scope="module")
def browser(written: tuple[Path, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = need("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    os.environ["SE_AVOID_STATS"] = "true"
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    driver.set_window_size(1280, 1000)
    driver.get(written[0].as_uri())
    yield driver
    driver.quit()


def values(browser: Any, selector: str) -> list[Any]:
    cells = browser.find_elements("css selector", selector)
    return [json.loads(cell.get_attribute("data-value")) for cell in cells if cell.is_displayed()]


@in_browser
def test_figures_are_drawn_without_an_error(browser: Any, written: tuple[Path, dict[str, Any]]) -> None:
    for name in ("ranks", "memory", "traffic", "timeline"):
        assert browser.find_elements("css selector", f"#{name} .main-svg"), name
        assert browser.find_element("id", name).get_attribute("aria-label")
    assert browser.title == f"{written[1]['model']['title']} on {written[1]['mesh']['text']}"
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


@in_browser
def test_numbers_are_those_of_the_json(browser: Any, written: tuple[Path, dict[str, Any]]) -> None:
    facts = written[1]
    cards = {
        "step": facts["step"]["seconds"],
        "share": facts["step"]["share"],
        "memory": max(facts["ranks"]["memory"]),
        "between": max(facts["ranks"]["sent_between"]),
        "balance": facts["balance"]["heaviest_over_mean"],
        "peers": max(facts["ranks"]["peers"]),
        "flops": facts["step"]["flops"],
        "waves": max(stage["waves"] for stage in facts["stages"]),
    }
    for name, value in cards.items():
        assert values(browser, f"#card-{name} .value") == [pytest.approx(value, rel=1e-12)], name
    shown = browser.find_element("css selector", "#card-step .value").text
    assert float(shown.split()[0]) == pytest.approx(facts["step"]["seconds"] * 1e3, abs=0.006)
    assert shown.endswith(" ms")
    assert values(browser, "#exchanges td:nth-child(5)") == [row["bytes_inside"] for row in facts["exchanges"]]
    assert values(browser, "#choices td:nth-child(2)") == [row["seconds"] for row in facts["choices"]]
    assert values(browser, "#meshes td:nth-child(1)") == [row["label"] for row in facts["meshes"]]
    (refused,) = [row["refused"] for row in facts["meshes"] if row["refused"]]
    assert browser.find_element("css selector", "#meshes td.refused").text == refused


@in_browser
def test_ranks_show_the_chosen_figure(browser: Any, written: tuple[Path, dict[str, Any]]) -> None:
    select = need("selenium.webdriver.support.select").Select(browser.find_element("id", "metric"))
    for option in [option.get_attribute("value") for option in select.options]:
        select.select_by_value(option)
        of_ranks = written[1]["ranks"][option]
        assert json.loads(browser.find_element("id", "metric-range").get_attribute("data-value")) == [
            min(of_ranks),
            max(of_ranks),
        ]
        drawn = browser.execute_script(
            "return document.getElementById('ranks').data[0].z.flat().filter((v) => v !== null)"
        )
        assert drawn == of_ranks


@in_browser
def test_sorting_and_search_by_keyboard(browser: Any, written: tuple[Path, dict[str, Any]]) -> None:
    params, keys = written[1]["params"], need("selenium.webdriver.common.keys").Keys
    count = browser.find_element("xpath", "//table[@id='params']//th[button='count']")
    for order, sign in (("descending", -1), ("ascending", 1)):
        count.find_element("tag name", "button").send_keys(keys.ENTER)
        assert count.get_attribute("aria-sort") == order
        assert values(browser, "#params td:nth-child(3)") == sorted(
            (row["count"] for row in params), key=lambda n: sign * n
        )
    search = browser.find_element("id", "search")
    search.send_keys("experts muon")
    wanted = sorted(row["name"] for row in params if "experts" in row["name"] and row["optimizer"] == "muon")
    assert wanted
    assert sorted(values(browser, "#params td:nth-child(1)")) == wanted
    assert browser.find_element("id", "found").text == f"{len(wanted)} of {len(params)} rows"
    search.send_keys(keys.CONTROL, "a", keys.DELETE)
    assert len(values(browser, "#params td:nth-child(1)")) == len(params)


@in_browser
def test_dark_and_light(browser: Any) -> None:
    seen = set()
    for _ in range(2):
        browser.find_element("id", "theme").click()
        back, text = (
            browser.execute_script(f"return getComputedStyle(document.body).{name}")
            for name in ("backgroundColor", "color")
        )
        figure = browser.execute_script("return document.getElementById('memory').layout.font.color")
        seen.add((back, text, figure))
    assert len({back for back, _, _ in seen}) == len({figure for _, _, figure in seen}) == 2


@in_browser
def test_a_phone_shows_it_without_scrolling_sideways(browser: Any) -> None:
    browser.set_window_size(500, 900)
    end = time.monotonic() + 100.0
    while True:  # the figures follow the window some time after it has its size
        wide, view = browser.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        if (wide <= view <= 500) or time.monotonic() > end:
            break
        time.sleep(0.05)
    browser.set_window_size(1280, 1000)
    assert wide <= view <= 500
