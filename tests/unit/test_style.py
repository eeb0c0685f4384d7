"""Ratchets over wording and parameters: their counts may fall, never rise.

`style.json` beside this file holds the counts. When one has fallen, record that, and when a test fails, see what it
counts:

    python tests/unit/test_style.py             lower the recorded counts to those of today
    python tests/unit/test_style.py alone       show each place that the pattern of this name matches

A match that is no fault goes into `exceptions` of that file, as an excerpt of its sentence below the pattern's name.
"""

import ast
import html
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BASELINE = Path(__file__).with_name("style.json")
_AROUND = {"tests", "docs", "deploy", "build", "dist"}
LONGEST, PARAMETERS = 35, 5

PATTERNS = {
    "question as opening": r"^(What|Whether|How|Who|Whose|Whom|Which|As)\b",
    "Of as opening": r"^Of\b",
    "as `X`": r"\bas `[^`]+`",
    "tells of": r"\b(told|tells?|says?)\b (of|which|what)\b",
    "of its own": r"\bof (its|their) own\b",
    "the one that": r"\bthe (one|ones) that\b",
    "that of": r"\b(that|those) of\b",
    "alone": r"\balone\b",
    "beside": r"\bbesides?\b",
    "go on": r"\b(go|goes|going|went|gone) on\b",
    "anew": r"\banew\b",
    "in place of": r"\bin place of\b",
    ", for": r", for\b(?! (example|instance)\b)",
    "Where as opening": r"^Where\b",
    "unless said": r"\bunless (said|given)\b",
    "nobody": r"\b(nobody|somebody|anybody|whoever)\b",
    "he": r"\b(he|his|him)\b",
    "at most after its number": r"\d[\w.,%]*( \w+)? at most\b",
    "some 64": r"\bsome \d",
    ", also": r", also\b",
    "is no": r"(?<!\bthere )\b(is|are) (no|none)\b",
    "stands in": r"\b(stands?|lies?) in\b",
    "shall": r"\bshall\b",
}
"""Sentences to remove, in the order of the style guide. Those with `^` begin a sentence; the first two, a docstring."""

LONG, SIGNATURE, SHARED = "long sentence", "long signature", "shared class name"
NAMES = (*PATTERNS, LONG, SIGNATURE, SHARED)
_DOCSTRINGS_ONLY = ("question as opening", "Of as opening")
_COMPILED = {
    name: re.compile(pattern, 0 if pattern.startswith("^") or name == "as `X`" else re.IGNORECASE)
    for name, pattern in PATTERNS.items()
}
_ENDS = re.compile(
    r"\n\s*\n"  # a paragraph
    r"|\n\s*(?=(?:Args|Attributes|Returns|Yields|Raises):)|\n\s+(?=[\w*, ]+: )"  # a section of a docstring, its entries
    r"|(?<=[.?!])[)\"”*]*\s+(?=[A-Z`\"(*])"
)


class Text(NamedTuple):
    """One passage for people, and where it is."""

    kind: str
    """One of docs, docstrings, help, errors, page and openapi."""
    place: str
    words: str


class Match(NamedTuple):
    """One place that a pattern finds."""

    pattern: str
    kind: str
    place: str
    sentence: str


def packages() -> list[Path]:
    return sorted(path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name not in _AROUND)


@cache
def modules() -> list[tuple[str, list[ast.AST]]]:
    """Our modules: each by its path, with all that its syntax tree holds."""
    files = [file for package in packages() for file in sorted(package.rglob("*.py"))]
    return [
        (str(file.relative_to(ROOT)), list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))) for file in files
    ]


def _prose(node: ast.expr | None) -> str:
    """The text of a literal; what an f-string inserts becomes X."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_prose(part) or "X" for part in node.values)
    return ""


def _of_code(file: str, nodes: list[ast.AST]) -> Iterator[Text]:
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(words))):  # of a module, class, function or attribute
                yield Text("docstrings", f"{file}:{node.lineno}", words)
            case ast.keyword(arg="help", value=value):
                yield Text("help", f"{file}:{value.lineno}", _prose(value))
            case ast.keyword(arg="description" | "summary" | "response_description", value=value):
                yield Text("openapi", f"{file}:{value.lineno}", _prose(value))
            case ast.Raise(exc=ast.expr() as raised):
                inside = {
                    part for found in ast.walk(raised) if isinstance(found, ast.JoinedStr) for part in found.values
                }
                for found in ast.walk(raised):
                    if isinstance(found, ast.expr) and found not in inside and (words := _prose(found)):
                        yield Text("errors", f"{file}:{found.lineno}", words)


def _of_page(file: Path) -> Iterator[Text]:
    written = file.read_text(encoding="utf-8")
    place = str(file.relative_to(ROOT))
    if file.suffix == ".html":
        yield from (Text("page", place, html.unescape(words)) for words in re.findall(r">([^<>{}]+)<", written))
        return
    code = re.sub(r"^\s*(//|/?\*).*$", "", written, flags=re.MULTILINE)
    for found in re.finditer(r'"([^"\n]+)"|`([^`]+)`', code):
        words = re.sub(r"\$\{[^}]*\}", "X", found[1] or found[2])
        if " " in words:
            yield Text("page", place, words)


def _of_markdown(file: Path) -> Iterator[Text]:
    place = str(file.relative_to(ROOT))
    written = re.sub(r"^(```|~~~).*?^\1", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    written = re.sub(
        r"<!-- generated:.*?<!-- end of generated -->", "", written, flags=re.DOTALL
    )  # counted in the code
    written = re.sub(r"!\[[^]]*\]\([^)]*\)", "", written)
    written = re.sub(r"\]\([^)]*\)", "]", written)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.) ?)", written):
        if not block.startswith("    "):
            yield from (Text("docs", place, words) for words in re.split(r"(?<!\\)\|", block.lstrip(" \n-*#")))


@cache
def texts() -> list[Text]:
    found = [text for file, nodes in modules() for text in _of_code(file, nodes)]
    for web in (path for package in packages() for path in package.rglob("*") if path.suffix in (".html", ".js")):
        if "vendor" not in web.parts:
            found += _of_page(web)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        found += _of_markdown(page)
    return found


def sentences(words: str) -> list[str]:
    """The sentences of a passage. Code between backticks counts as one word, and a doctest as none."""
    words = re.sub(r"^\s*(>>>|\.\.\.).*$", "", words, flags=re.MULTILINE)
    words = re.sub(r"`+[^`]+`+", "`X`", words)
    return [" ".join(sentence.split()) for sentence in _ENDS.split(words.strip()) if sentence.strip()]


def matches(text: Text, exceptions: dict[str, list[str]]) -> Iterator[Match]:
    for number, sentence in enumerate(sentences(text.words)):
        found = [
            name
            for name, pattern in _COMPILED.items()
            if (name not in _DOCSTRINGS_ONLY or (text.kind == "docstrings" and number == 0))
            for _ in pattern.finditer(sentence)
        ]
        if len(sentence.split()) > LONGEST:
            found.append(LONG)
        for name in found:
            if not any(excerpt in sentence for excerpt in exceptions.get(name, ())):
                yield Match(name, text.kind, text.place, sentence)


def long_signatures() -> Iterator[Match]:
    """Functions with more than five parameters, `self` and `cls` not counted."""
    for file, nodes in modules():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                taken = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                count = sum(each.arg not in ("self", "cls") for each in taken)
                if count > PARAMETERS:
                    yield Match(SIGNATURE, "code", f"{file}:{node.lineno}", f"{node.name} takes {count} parameters")


def shared_names() -> Iterator[Match]:
    """Public classes whose name another module has as well."""
    named: dict[str, list[str]] = {}
    for file, nodes in modules():
        for node in nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                named.setdefault(node.name, []).append(f"{file}:{node.lineno}")
    for name, places in named.items():
        if len(places) > 1:
            yield from (Match(SHARED, "code", place, name) for place in places)


def all_matches(exceptions: dict[str, list[str]]) -> list[Match]:
    found = [match for text in texts() for match in matches(text, exceptions)]
    return [*found, *long_signatures(), *shared_names()]


def counts(exceptions: dict[str, list[str]]) -> dict[str, dict[str, int]]:
    """How often each pattern matches, by kind of text."""
    tally = Counter((match.pattern, match.kind) for match in all_matches(exceptions))
    found: dict[str, dict[str, int]] = {name: {} for name in NAMES}
    for (name, kind), count in sorted(tally.items()):
        found[name][kind] = count
    return found


def recorded() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(BASELINE.read_text(encoding="utf-8"))
    return read


@pytest.fixture(scope="module")
def today() -> dict[str, dict[str, int]]:
    return counts(recorded()["exceptions"])


@pytest.mark.parametrize("name", NAMES)
def test_no_count_rises(name: str, today: dict[str, dict[str, int]]) -> None:
    before = recorded()["counts"].get(name, {})
    risen = [
        f"{kind}: {before.get(kind, 0)} -> {now}" for kind, now in today[name].items() if now > before.get(kind, 0)
    ]
    assert not risen, f"see them: python tests/unit/test_style.py '{name}'"


@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        ("docstrings", "What a node does.", ["question as opening"]),
        ("docs", "What a node does.", []),
        ("docstrings", "Returns the sum. How it is made does not matter.", []),
        (
            "docs",
            "It is alone beside 3 tasks at most, for it shall go on.",
            ["alone", "beside", "go on", ", for", "at most after its number", "shall"],
        ),
        ("help", "Seconds, for example 3.", []),
        ("errors", " ".join(["word"] * 36), [LONG]),
        ("docs", "Send it as `x-1 alone`.", ["as `X`"]),
    ],
)
def test_the_patterns_find_what_they_name(kind: str, words: str, expected: list[str]) -> None:
    assert sorted(match.pattern for match in matches(Text(kind, "", words), {})) == sorted(expected)


def test_the_texts_of_each_kind_are_read() -> None:
    assert {text.kind for text in texts()} == {"docs", "docstrings", "help", "errors", "page", "openapi"}


def _lower() -> None:
    known = recorded() if BASELINE.exists() else {"exceptions": {}, "counts": {}}
    now = counts(known["exceptions"])
    for name, kinds in now.items():
        if name in known["counts"]:
            kinds.update({kind: min(count, known["counts"][name].get(kind, 0)) for kind, count in kinds.items()})
    written = json.dumps({"exceptions": known["exceptions"], "counts": now}, indent=1, ensure_ascii=False)
    BASELINE.write_text(f"{written}\n", encoding="utf-8")


def _show(name: str) -> None:
    for match in all_matches(recorded()["exceptions"]):
        if match.pattern == name:
            print(match.kind, match.place, match.sentence)  # noqa: T201


if __name__ == "__main__":
    _show(sys.argv[1]) if sys.argv[1:] else _lower()
