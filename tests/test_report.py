"""`plancache report`: one page that is whole in itself, and that no stored string can make do anything."""

import html.parser
import json
import re
import shutil
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli
from plancache.keys import pack
from plancache.report import page
from plancache.store import records
from plancache.stored import documents

EVIL = "</script></title><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>{{script}}"


@pytest.fixture
def foreign(warm, tmp_path):
    """A cache whose every stored string is markup that would run a script."""
    with plancache.open(warm) as cache, plancache.open(tmp_path / "evil <b>") as other:
        for listed in list(cache.rows()):
            record = cache.store.get(listed.row.key, listed.row.route)
            row, fields = records.decode(record)
            parts = documents(fields)
            parts["labels"] = {uid: f"{EVIL}{uid}" for uid in parts["labels"]}
            parts["device"] = {**parts["device"], "deviceName": EVIL}
            for node in parts["graph"]["nodes"]:
                node["params"] = {**node["params"], "mode": EVIL, EVIL: EVIL}
                node["type"] = "POINTWISE"
            changed = replace(row, builder=EVIL, operation=EVIL, name=f"{EVIL}_k1", route=row.route)
            other.store.put(changed, records.encode(changed, {**fields, "documents": pack(parts)}))
    return tmp_path / "evil <b>"


class _Read(html.parser.HTMLParser):
    """Which elements a page has, what handlers, and where it would load something from."""

    def __init__(self):
        super().__init__()
        self.elements, self.handlers, self.loads = [], [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def read(text):
    reader = _Read()
    reader.feed(text)
    return reader


def rows_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])[
        "rows"
    ]


def test_the_page_has_every_plan_and_loads_nothing(warm):
    with plancache.open(warm, mode="read-only") as cache:
        text = page(cache)
        keys = {listed.row.key for listed in cache.rows()}
    assert {row[0] for row in rows_of(text)} == keys
    found = read(text)
    assert (found.handlers, found.loads) == ([], [])
    assert found.elements.count("script") == 2
    assert found.elements.count("details") == 3
    assert "default-src 'none'; script-src 'sha256-" in text
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "All 3 plans." in text
    assert "sdpa 2×8×512×128 causal, f16" in text


def test_no_stored_string_is_markup(foreign):
    with plancache.open(foreign, mode="read-only") as cache:
        text = page(cache)
    found = read(text)
    assert (found.handlers, found.loads) == ([], [])
    assert found.elements.count("script") == 2
    assert not {"img", "b"} & set(found.elements)
    assert text.count("{{script}}") >= 3  # what is stored is not filled in
    assert {row[6] for row in rows_of(text)} == {EVIL}


def test_the_page_is_bounded_and_says_so(warm):
    with plancache.open(warm, mode="read-only") as cache:
        text = page(cache, limit=2)
        newest = [listed.row.key for listed in cache.rows()][:2]
    assert [row[0] for row in rows_of(text)] == newest
    assert "The newest 2 of 3 plans" in text
    assert '<div class="value">3</div>' in text


def test_a_cache_without_plans_has_a_page(tmp_path):
    with plancache.open(tmp_path / "cache") as cache:
        text = page(cache)
    assert rows_of(text) == []
    assert text.count("Nothing yet.") == 4


def test_the_command_writes_the_page_and_does_not_overwrite(warm, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(cli, ["--dir", str(warm), "report", *map(str, arguments)])

    assert "KB" in invoke(tmp_path / "page.html").output
    again = invoke(tmp_path / "page.html")
    assert (again.exit_code, "exists" in again.output) == (1, True)
    assert invoke(tmp_path / "page.html", "--force").exit_code == 0
    assert invoke(tmp_path / "none" / "page.html").exit_code == 1


# ------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    there = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=there, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"there is no Chromium here: {str(error).splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture
def shown(browser, tmp_path):
    """Opens the page of a cache in a browser; nothing may be said on its console, nor loaded."""
    said, pages = [], []

    def show(path, scheme="light"):
        with plancache.open(path, mode="read-only") as cache:
            (tmp_path / "page.html").write_text(page(cache), encoding="utf-8")
        one = browser.new_page(color_scheme=scheme)
        pages.append(one)
        one.on("console", lambda message: said.append(message.text))
        one.on("pageerror", lambda error: said.append(str(error)))
        one.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
        one.goto((tmp_path / "page.html").as_uri())
        return one

    yield show
    for one in pages:
        one.close()
    assert said == []


def test_in_a_browser_the_table_filters_sorts_and_leads_to_drawings(warm, shown):
    one = shown(warm)
    lines = one.locator("#plans tbody tr")
    assert lines.count() == 3
    one.locator("#search").fill("conv 8x64")
    assert lines.count() == 1
    assert one.locator("#count").inner_text() == "1 of 3"
    one.locator("#search").fill("nothing like it")
    assert lines.count() == 0
    one.locator("#search").fill("")
    for name, column in (("operation", 2), ("KB", 9)):
        heading = one.locator("#plans th", has_text=re.compile(f"^{name}"))
        orders = []
        for _ in range(2):
            heading.locator("button").click()
            orders.append(
                (heading.get_attribute("aria-sort"), lines.locator(f"td:nth-child({column})").all_inner_texts())
            )
        (first, texts), (second, other) = orders
        assert {first, second} == {"ascending", "descending"}
        assert texts == list(reversed(other)) != other
    lines.locator("a").first.click()
    assert one.locator("details[open] svg.graph").is_visible()


def test_in_a_browser_light_and_dark_differ_and_both_can_be_read(warm, shown):
    def colours(scheme):
        one = shown(warm, scheme)
        script = "getComputedStyle(document.body).{}"
        return [one.evaluate(script.format(name)) for name in ("color", "backgroundColor")]

    def light(colour):
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 765

    ink, paper = map(light, colours("light"))
    dark_ink, dark_paper = map(light, colours("dark"))
    assert paper - ink > 0.7
    assert dark_ink - dark_paper > 0.7


def test_in_a_browser_no_stored_string_runs(foreign, shown):
    one = shown(foreign)
    assert one.locator("#plans tbody tr").count() == 3
    one.locator("#plans tbody a").first.click()
    assert one.locator("details[open]").count() == 1
    assert one.evaluate("window.evil") is None
    assert one.locator("td", has_text=EVIL).count() > 0
    time.sleep(0.1)  # an error handler would come later
    assert one.evaluate("window.evil") is None
