"""DOT, SVG and HTML: complete, escaped, collapsed when large; and the page at work in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.browser import CHROMIUM, Page, browser
from support.reported import HOSTILE, hostile_report, nested_report_once

import remat
from remat.report.data.groups import MAX_BOXES, arrows_of, boxes_of

NUM_MANY = 10_000
FORMS = (".txt", ".json", ".dot", ".svg", ".html")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine; .ci/run installs it")


@pytest.fixture(scope="module")
def many() -> remat.Report:
    return hostile_report(NUM_MANY)


# --- boxes -------------------------------------------------------------------------------------------------------


def test_boxes_hold_every_node_that_runs_once_per_run() -> None:
    (graph,) = nested_report_once().graphs
    for limit in (10_000, MAX_BOXES, 10):
        boxes = boxes_of(graph, limit)
        assert tuple(name for box in boxes for name in box.nodes) == graph.moments


def test_large_graphs_are_collapsed(many: remat.Report) -> None:
    assert len(boxes_of(many.graphs[0])) <= MAX_BOXES


def test_small_graphs_have_a_box_per_node() -> None:
    (graph,) = hostile_report(20).graphs
    assert all(len(box.nodes) == 1 for box in boxes_of(graph))


def test_arrows_follow_the_order_of_execution() -> None:
    (graph,) = nested_report_once().graphs
    boxes = boxes_of(graph)
    arrows = arrows_of(graph, boxes)
    assert all(arrow.source < arrow.target for arrow in arrows)
    crossing = {value for arrow in arrows if arrow.crosses for value in arrow.values}
    assert crossing == {d.value for d in graph.plan.saved}


# --- DOT and SVG -------------------------------------------------------------------------------------------------


def test_dot_has_regions_as_clusters_and_balanced_braces() -> None:
    text = nested_report_once().to_dot()
    assert 'label="attention"; style="rounded"' in text
    bare = re.sub(r'"(\\.|[^"\\])*"', '""', text)
    assert bare.count("{") == bare.count("}")
    assert {line.strip()[-1] for line in bare.splitlines() if line.strip()} <= set("{};")


def test_svg_has_a_frame_per_region_and_a_colour_per_decision() -> None:
    root = ElementTree.fromstring(nested_report_once().to_svg())
    classes = [element.get("class", "") for element in root.iter()]
    titles = ["".join(element.itertext()) for element in root.iter() if element.get("class") == "g-region"]
    assert {"region block", "region attention", "region mlp"} == set(titles)
    assert {"g-saved", "g-recomputed", "g-arrow g-kept"} <= set(classes)


@pytest.mark.parametrize("suffix", FORMS)
def test_no_form_is_broken_by_hostile_names(many: remat.Report, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"report{suffix}"
    many.save(file)
    text = file.read_text(encoding="utf-8")
    if suffix == ".json":
        assert remat.Report.from_json(text) == many
        return
    if suffix in (".svg", ".html"):
        assert "<script>document" not in text
        assert "<img" not in text
    if suffix == ".svg":
        ElementTree.fromstring(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\ud800-\udfff]", text)


def test_text_dump_has_one_line_per_node_whatever_it_is_called() -> None:
    report = hostile_report(30)
    lines = report.to_text().splitlines()
    start = lines.index("forward")
    assert len(lines[start + 1 : lines.index("backward")]) == 30 + 1  # the nodes, and what forward returns


def test_why_survives_hostile_names() -> None:
    report = hostile_report(30)
    assert len(report.why(HOSTILE[0]).answers) == 1
    assert "\x1b" not in str(report.why(HOSTILE[3]))


# --- the page ----------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "action", "data")]


def test_page_loads_nothing_and_has_two_scripts(many: remat.Report) -> None:
    links = Links()
    links.feed(many.to_html())
    assert links.loaded == []
    assert links.tags.count("script") == 2  # the data, and the page's own
    assert "img" not in links.tags


def test_data_of_the_page_is_what_the_report_says() -> None:
    report = nested_report_once()
    (text,) = re.findall(r'id="data">(.*?)</script>', report.to_html())
    (graph,) = json.loads(text)["graphs"]
    assert len(graph["decisions"]) == len(report.plans[0].decisions)
    assert graph["peak"]["num_bytes"] == report.plans[0].peak.num_bytes == max(graph["live"])


def test_notebook_cell_is_a_frame_that_reaches_nothing() -> None:
    cell = nested_report_once()._repr_html_()
    assert cell.startswith("<iframe srcdoc=")
    assert 'sandbox="allow-scripts"' in cell
    assert "<script" not in cell


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as page:
        yield page


@needs_browser
def test_page_of_ten_thousand_decisions_works(many: remat.Report, opened: Page, tmp_path: Path) -> None:
    """Sorting, filtering, hovering and opening; and nothing that the user's names say is run."""
    many.save(tmp_path / "report.html")
    seconds = opened.open(tmp_path / "report.html")
    assert seconds < 20  # a page that hangs, not a slow machine
    assert opened.value("document.querySelector('[role=status]').textContent") == f"{NUM_MANY} of {NUM_MANY}"
    assert opened.value("document.querySelectorAll('.body .row').length") < 60

    def column(k: int) -> list[str]:
        return list(
            opened.value(f"[...document.querySelectorAll('.body .row')].map((row) => row.children[{k}].textContent)")
        )

    assert column(2)[:3] == ["6.00 KiB"] * 3
    opened.value("document.querySelectorAll('.head button')[2].click()")
    assert column(2)[:3] == ["0 B"] * 3

    opened.value(
        "(() => { const box = document.querySelector('input'); box.value = 'v9999 cheaper';"
        " box.dispatchEvent(new Event('input')); })()"
    )
    found = [k for k in range(NUM_MANY) if k % 3 and "v9999" in f"v{k}"]
    assert opened.value("document.querySelector('[role=status]').textContent") == f"{len(found)} of {NUM_MANY}"

    opened.value(
        "(() => { const c = document.querySelector('canvas'), box = c.getBoundingClientRect();"
        " c.dispatchEvent(new MouseEvent('mousemove', {clientX: box.left + 79, clientY: box.top + 50})); })()"
    )
    assert "forward, v" in opened.value("document.querySelector('.tip').textContent")
    assert opened.value("document.querySelector('.tip').hidden") is False

    opened.value("(() => { for (const d of document.querySelectorAll('details')) d.open = true; })()")
    assert opened.value("document.querySelectorAll('script').length") == 2
    assert opened.value("document.title") != "owned"
    assert opened.problems == []


@needs_browser
def test_row_says_why_when_it_is_clicked(opened: Page, tmp_path: Path) -> None:
    report = nested_report_once()
    report.save(tmp_path / "report.html")
    opened.open(tmp_path / "report.html")
    opened.value("document.querySelector('.body .row').click()")
    text = opened.value("document.querySelector('.chosen-box').textContent")
    assert "running it again costs" in text
    assert opened.problems == []
