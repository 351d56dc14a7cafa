"""The site that `make site` builds: no warning, no dead link, no page that none leads to, nothing from another host.

By day test_release.py follows the links of the pages as they are written."""

from __future__ import annotations

import json
import logging
import posixpath
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from mkdocs.commands.build import build
from mkdocs.config import load_config

from docs.gallery import make
from tests.harness.browser import CHROMIUM, Browser, served
from tests.harness.pages import ROOT
from train.subcommands import SUBCOMMANDS

pytestmark = pytest.mark.nightly
IN_A_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


class Scanned(HTMLParser):
    """A page as built: its anchors, its links, what a browser loads with it, and the number of blocks in its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.blocks = dict.fromkeys(("li", "pre", "table", "blockquote", "img"), 0)
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        self.inside |= tag == "article"
        self.anchors |= {name for name in (of.get("id"), of.get("name")) if name}
        if tag == "a" and of.get("href"):
            self.links.append(str(of["href"]))
        if link := of.get("src") or (tag == "link" and of.get("href")):
            self.loaded.append(str(link))
        if self.inside and tag in self.blocks:
            self.blocks[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self.inside &= tag != "article"


class Site(NamedTuple):
    folder: Path
    pages: dict[str, Scanned]
    warnings: list[str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The site, with a gallery of few schedules."""
    folder, warnings = tmp_path_factory.mktemp("site"), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(handler)
    few = tuple(entry for entry in make.PUBLISHED if entry.name in ("zero3", "hpz", "1f1b"))
    try:
        with mock.patch.object(make, "PUBLISHED", few):
            build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=False))
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.html")}
    return Site(folder, {name: Scanned(path.read_text()) for name, path in files.items()}, warnings)


def test_it_is_built_without_a_warning(site: Site) -> None:
    assert not site.warnings, "\n".join(site.warnings)
    assert {"index.html", "design.html", "CONTRIBUTING.html", "recipes/dpo.py.html"} <= set(site.pages)


def test_the_page_of_commands_has_each(site: Site) -> None:
    """An anchor of its name."""
    assert set(SUBCOMMANDS) <= site.pages["cli.html"].anchors


def test_the_gallery_is_made_with_it(site: Site) -> None:
    assert {f"gallery/{name}.html" for name in ("index", "zero3", "hpz", "1f1b", "every-other")} <= set(site.pages)
    assert (site.folder / "gallery" / "zero3.json").is_file()
    assert (site.folder / "gallery" / "index.png").is_file()


def test_every_link_leads_to_a_file_and_an_anchor_that_are_there(site: Site) -> None:
    dead = []
    for name, page in site.pages.items():
        for link in page.links + page.loaded:
            path, _, anchor = unquote(link).partition("#")
            if name == "404.html" or path.startswith(("http:", "https:", "mailto:", "data:")):
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            there = (site.folder / target).is_file()
            if not there or (anchor and target in site.pages and anchor not in site.pages[target].anchors):
                dead.append(f"{name}: {link}")
    assert not dead, "\n".join(dead)


def test_every_page_has_the_navigation(site: Site) -> None:
    """But the playground, which leads home."""
    for name, page in site.pages.items():
        home = posixpath.relpath("index.html", posixpath.dirname(name) or ".")
        assert home in page.links or name == "404.html", name
        quickstart = posixpath.relpath("tutorial.html", posixpath.dirname(name) or ".")
        assert {quickstart, "/tutorial.html"} & set(page.links) or name == "playground/index.html", name


def test_the_page_of_an_address_that_is_not_there_leads_home(site: Site) -> None:
    assert '<a href="/index.html">To the first page</a>' in (site.folder / "404.html").read_text()


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("pmap", "coming_from/jax.html"),
        ("jit", "coming_from/jax.html"),
        ("orbax", "coming_from/jax.html"),
        ("fully_shard", "coming_from/fsdp2.html"),
        ("deepspeed", "coming_from/deepspeed.html"),
        ("peft", "coming_from/transformers.html"),
        ("quickstart", "tutorial.html"),
        ("install", "index.html"),
        ("yafsdp compare", "command.html"),
        ("windows", "faq.html"),
        ("donated", "faq.html"),
    ],
)
def test_search_finds_what_one_knows_from_elsewhere(word: str, page: str, site: Site) -> None:
    entries = json.loads((site.folder / "search" / "search_index.json").read_text())["docs"]
    found = [entry["location"] for entry in entries if word in f"{entry['title']} {entry['text']}".lower()]
    assert page in {location.partition("#")[0] for location in found}


CLIPPED = """[...document.querySelectorAll("article pre > code")]
    .filter(code => code.scrollWidth > code.clientWidth + 1)
    .flatMap(code => code.textContent.split("\\n"))
    .map(line => line.length)"""


@IN_A_BROWSER
def test_code_is_not_clipped_and_no_page_is_wider_than_its_window(site: Site) -> None:
    """At 1400 pixels, lines of up to 120 columns are seen whole; what is wider (a program, printed) scrolls. At 400, a
    page as a whole does not."""
    seen = ("index", "tutorial", "from_scratch", "coming_from/jax", "api/training", "axes", "faq", "know")
    with served(site.folder) as url, Browser(1400, 1000) as browser:
        for name in (*seen, "examples/from_scratch.py"):
            for width in (1400, 400):
                browser.size(width, 1000)
                browser.open(f"{url}{name}.html")
                assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, width)
            browser.size(1400, 1000)
            lines = browser.evaluate(CLIPPED)
            assert not lines or max(lines) > 120, (name, max(lines))


BROKEN = """[...document.querySelectorAll("article td code")].flatMap(code => {
    const walk = document.createTreeWalker(code, NodeFilter.SHOW_TEXT), broken = [];
    for (let node; node = walk.nextNode();)
        for (const word of node.data.matchAll(/[\\w./]+/g)) {
            const range = document.createRange();
            range.setStart(node, word.index);
            range.setEnd(node, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map(line => Math.round(line.top))).size > 1) broken.push(word[0]);
        }
    return broken;
})"""
"""Names in code of tables that go on in another line."""


@IN_A_BROWSER
def test_no_name_in_a_table_is_broken_on_a_telephone(site: Site) -> None:
    """In tables of names, which are long."""
    with served(site.folder) as url, Browser(400, 1000) as browser:
        for name in ("deterministic", "coming_from/jax", "coming_from/fsdp2", "know"):
            browser.open(f"{url}{name}.html")
            assert browser.evaluate(BROKEN) == [], name


@IN_A_BROWSER
def test_a_page_of_the_reference_is_what_one_reads(site: Site) -> None:
    """At one go: none is too long."""
    with served(site.folder) as url, Browser(1400, 1000) as browser:
        for page in sorted((site.folder / "api").glob("*.html")):
            browser.open(f"{url}api/{page.name}")
            height = browser.evaluate("document.documentElement.scrollHeight")
            assert height < 11_000, (page.name, height)


CONTRAST = """(() => {
    const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const onto = ([r, g, b, a = 1], below) => [r, g, b].map((c, k) => c * a + below[k] * (1 - a));
    const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const behind = at => {
        const own = channels(getComputedStyle(at).backgroundColor);
        if (own[3] === undefined || own[3] === 1) return own.slice(0, 3);
        return onto(own, at.parentElement ? behind(at.parentElement) : [255, 255, 255]);
    };
    const found = new Set(), texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; node = texts.nextNode();) {
        const at = node.parentElement, style = getComputedStyle(at);
        if (!node.data.trim() || !at.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
        const below = behind(at), [a, b] = [light(onto(channels(style.color), below)), light(below)];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
        if (ratio < (large ? 3 : 4.5)) found.add(`${at.tagName}.${at.className} ${ratio.toFixed(2)}: ${node.data}`);
    }
    return [...found];
})()"""
"""Text whose contrast with what is behind it is less than WCAG asks for (AA)."""


@IN_A_BROWSER
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_one_can_read(scheme: str, site: Site) -> None:
    seen = ("index", "tutorial", "know", "faq", "api/training", "gallery/index", "playground/index", "from_scratch")
    with served(site.folder) as url, Browser(1400, 1000) as browser:
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        for name in seen:
            browser.open(f"{url}{name}.html")
            browser.wait("document.readyState == 'complete'")
            assert browser.evaluate(CONTRAST) == [], name


@IN_A_BROWSER
def test_pictures_are_dark_on_a_dark_page(site: Site) -> None:
    for scheme, expected in (("light", "none"), ("dark", "invert(0.88) hue-rotate(180deg)")):
        with served(site.folder) as url, Browser(1400, 1000) as browser:  # each begins without a choice of its reader
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            browser.open(f"{url}index.html")
            browser.wait(f"getComputedStyle(document.querySelector('article img')).filter == '{expected}'")


def test_every_page_is_reached_from_the_first(site: Site) -> None:
    reached = {"404.html"}
    todo = {"index.html"}
    while todo:
        reached.add(name := todo.pop())
        links = {
            posixpath.normpath(posixpath.join(posixpath.dirname(name), link.partition("#")[0]))
            for link in site.pages[name].links
        }
        todo |= (links & set(site.pages)) - reached
    assert set(site.pages) - reached == set()


def test_nothing_is_loaded_from_another_host(site: Site) -> None:
    loaded = {link for page in site.pages.values() for link in page.loaded}
    assert loaded
    assert [link for link in loaded if link.startswith(("http:", "https:", "//"))] == []


def test_a_page_has_the_blocks_that_it_has_on_github(site: Site) -> None:
    """Markdown has dialects: a list that needs an empty line before it in one is a line of prose in the other."""
    commonmark = MarkdownIt("commonmark").enable("table")
    different = []
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        page = "index.html" if path.name == "README.md" else f"{path.relative_to(ROOT).with_suffix('.html')}"
        there = Scanned(f"<article>{commonmark.render(path.read_text())}</article>").blocks
        here = site.pages[page.removeprefix("docs/")].blocks
        if here != there and path.parent.name != "api":  # those are lists of names there
            different.append(f"{path}: {here}, on GitHub {there}")
    assert not different, "\n".join(different)
