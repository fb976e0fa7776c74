"""What the pages in `docs/` and README say of the code is there: files, functions, rooms, words. And it is short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ARCHITECTURE, GLOSSARY = ROOT / "docs" / "architecture.md", ROOT / "docs" / "glossary.md"
MOST_WORDS = 30

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)\)")
NAMED = re.compile(r"(?P<file>\b(?:passes|remat|tests|benchmarks)/[\w/]+\.py)(?::(?P<name>\w+(?:\.\w+)*))?")
"""A file of the project by its path from the top, and after a colon what it defines, `Class.method` too."""
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"\*\*(.+?)\*\*")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
each_text = pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)


# --- files and names ---------------------------------------------------------------------------------------------


@each_text
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = [link["target"] for link in LINK.finditer(page.read_text()) if "://" not in link["target"]]
    assert targets
    assert [target for target in targets if not (page.parent / target).exists()] == []


@each_page
def test_every_link_to_source_leads_where_its_text_says(page: Path) -> None:
    for link in LINK.finditer(page.read_text()):
        named = NAMED.search(link["text"])
        if named is not None:
            assert (page.parent / link["target"]).resolve() == (ROOT / named["file"]).resolve(), link[0]


@each_text
def test_every_file_and_name_that_is_mentioned_exists(page: Path) -> None:
    wrong = [
        named[0]
        for named in NAMED.finditer(page.read_text())
        if not (ROOT / named["file"]).is_file() or (named["name"] and named["name"] not in defined_in(named["file"]))
    ]
    assert wrong == []


@cache
def defined_in(file: str) -> frozenset[str]:
    """The functions and classes of a module, methods with their class's name in front."""
    return frozenset(definitions(ast.parse((ROOT / file).read_text()), ""))


def definitions(tree: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{prefix}{node.name}.")


def test_names_of_drawings_are_in_the_file_they_stand_beside() -> None:
    """In a drawing a row says `7  path/of/file.py   name`, with or without more."""
    rows = [row for drawing in FENCED.findall(ARCHITECTURE.read_text()) for row in drawing.splitlines()]
    beside = [found.groups() for row in rows if (found := re.search(r"(\S+\.py) +(\w+)", row))]
    assert len(beside) > 10
    assert [(file, name) for file, name in beside if name not in defined_in(file)] == []


# --- the house ---------------------------------------------------------------------------------------------------


def drawn_rooms() -> list[str]:
    """The rooms of both packages as they are drawn, with their whole names: `remat.eager.types`."""
    rooms = []
    for drawing in FENCED.findall(ARCHITECTURE.read_text()):
        _, title, *rows, _ = drawing.splitlines()
        if title not in ("passes/", "remat/"):
            continue
        outer = ""
        for indent, name in (found.groups() for row in rows if (found := re.match(r"( +)(\w+)  ", row))):
            outer = name if len(indent) == 2 else outer
            rooms.append(".".join(dict.fromkeys([title[:-1], outer, name])))
    return rooms


def test_every_room_is_drawn_once() -> None:
    packages = [path.parent.relative_to(ROOT) for top in ("passes", "remat") for path in (ROOT / top).rglob("*.py")]
    rooms = {".".join(path.parts) for path in packages if path.parts[:2] != ("remat", "passes")}
    assert sorted(drawn_rooms()) == sorted({*rooms, "passes.torch_private"} - {"passes", "remat"})


def test_rooms_are_drawn_below_all_that_they_import() -> None:
    drawn = drawn_rooms()
    for place, room in enumerate(drawn):
        init = ROOT.joinpath(*room.split("."), "__init__.py")
        if not init.exists():
            continue
        declared = re.search(r"^Imports: (.+)$", ast.get_docstring(ast.parse(init.read_text())) or "", re.MULTILINE)
        imported = [f"{room.split('.')[0]}.{name}" for name in declared[1].split(", ")] if declared else []
        assert set(imported) - {"remat.passes"} <= set(drawn[:place]), room


# --- words -------------------------------------------------------------------------------------------------------


def defined_words() -> list[str]:
    """The words that the glossary defines."""
    entries = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("- **")]
    return [word for entry in entries for word in WORD.findall(entry)]


def test_every_word_is_defined_once() -> None:
    words = defined_words()
    assert len(words) > 80
    assert [word for word in words if words.count(word) > 1] == []


def test_every_word_of_the_glossary_is_used() -> None:
    sources = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "remat").rglob("*.py"), ROOT / "README.md", ARCHITECTURE]
    text = with_spaces("\n".join(path.read_text() for path in sources).lower())
    assert [word for word in defined_words() if not re.search(rf"\b{with_spaces(word)}(s|es)?\b", text)] == []


def with_spaces(text: str) -> str:
    """Names of the code as words."""
    return re.sub(r"[_-]", " ", text)


@each_page
def test_sentences_are_short(page: Path) -> None:
    long = [sentence for sentence in sentences(page.read_text()) if len(re.findall(r"\S*\w\S*", sentence)) > MOST_WORDS]
    assert long == []


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose, list items and cells of tables; links as the text they show, drawings left out."""
    text = LINK.sub(lambda link: link["text"], FENCED.sub("\n\n", text))
    for piece in re.split(r"\n\s*\n|\n(?=\s*(?:[-#|]|\d+\.) ?)|\|", text):
        yield from re.split(r"(?<=[.!?])\s+", piece.strip())


def test_long_sentences_are_seen_wherever_they_stand() -> None:
    long = " ".join(["word"] * (MOST_WORDS + 1))
    for text in (long, f"Short.\n\n- item\n- {long}", f"| cell | {long} |", f"Short. {long}."):
        assert max(len(sentence.split()) for sentence in sentences(text)) > MOST_WORDS
    assert max(len(sentence.split()) for sentence in sentences(f"Short.\n```text\n{long}\n```\nShort.")) == 1
