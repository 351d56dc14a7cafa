"""Refuses docstrings whose first sentence has no subject, and words with two meanings in the library (a class's name
twice, a retired word, a name of `ONE_MEANING` in another file): `python -m tests.docstrings yafsdp_fn models`.

A docstring begins with what the thing is or does ("Reduces a unit's gradient ...", "The flat shards of ..."), not with
a clause that hangs in the air ("What becomes of ...", "Of a unit: ...") or with a list of fields ("rows: ...").
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

HEADLESS = re.compile(
    r"(What|Whatever|Who|Whoever|Whose|Which|Whether|Where|When|Why|How|That|Those|This is what|The same|Likewise"
    r"|Of|As|For|From|By|On|In|At|To|With|Without|Under|Within|Among|After|Before|While|If|Because|Since)\b(?!-)"
)
FIELDS = re.compile(r"[a-z_]+(, [a-z_]+)*: ")

RETIRED = re.compile("(parcel|mail|deal|dealt|sight|lever|weigh|draft)s?", re.IGNORECASE)
"""Words that the library no longer uses, in names, docstrings and comments: it has messages, splits rows, and so on."""

CORE = ("params", "program", "proof", "schedules", "runtime", "pipelines")
ONE_MEANING = {
    "part": "program/ops.py proof/gradients.py runtime/state.py",
    "parts": "program/trace.py program/program.py",
    "place": "program/split.py",
    "use": "communication/streams.py proof/errors.py",
    "uses": "program/ops.py runtime/works.py",
    "walk": "",
    "keep": "program/ops.py runtime/visit.py",
    "carries": "program/measured.py runtime/block_call.py",
    "carried": "program/program.py proof/execution.py proof/computes.py runtime/slots.py",
}
"""Names of the core with one meaning (docs/design.md has it), and the files that may give it to a class, function,
argument or field."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of docstrings, those of constants and fields included: all statements that are one string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def headless(file: Path) -> list[str]:
    """Returns `file:line: sentence` for each docstring that begins with no subject."""
    found = []
    for line, text in docstrings(ast.parse(file.read_text())):
        if HEADLESS.match(text) or (line > 1 and FIELDS.match(text)):  # a module may begin with its verb's name
            sentence = re.split(r"(?<=\.)\s|\n\n", text, maxsplit=1)[0]
            found.append(f"{file.relative_to(ROOT)}:{line}: {' '.join(sentence.split())}")
    return found


def classes_of_one_name(library: Path) -> list[str]:
    """Returns `name: files` for each name that classes of several files of the library have."""
    places = defaultdict(list)
    for file in sorted(library.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(library.parent)))
    return [f"class {name}: {', '.join(files)}" for name, files in places.items() if len(set(files)) > 1]


def retired(file: Path) -> Iterator[str]:
    """Yields `file:line: word` for each retired word, alone or in a name."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        for word in re.findall("[A-Z]?[a-z]+", line):
            if RETIRED.fullmatch(word):
                yield f"{file.relative_to(ROOT)}:{number}: {word}: a retired word"


def names_given(tree: ast.AST) -> Iterator[str]:
    """Yields the names of the classes, functions, arguments and fields of a file, without underscores in front."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield name.strip("_")
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name.strip("_")


def given_elsewhere(library: Path) -> Iterator[str]:
    """Yields `file: name` for each name of `ONE_MEANING` that another file of the core gives to a thing."""
    for file in sorted(file for folder in CORE for file in (library / folder).rglob("*.py")):
        here = str(file.relative_to(library))
        for name in sorted(ONE_MEANING.keys() & set(names_given(ast.parse(file.read_text())))):
            if here not in ONE_MEANING[name].split():
                yield f"{here}: {name}: a name with another meaning, in {ONE_MEANING[name]}"


def main(paths: list[str]) -> int:
    """Prints headless sentences in `paths`, files or folders, and words with two meanings; returns 1 if any."""
    files = [
        file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    ]
    found = [entry for file in sorted(files) for entry in headless(file)]
    for entry in found:
        print(entry)
    if found:
        print(f"{len(found)} docstrings begin with no subject: say first what the thing is or does", file=sys.stderr)
    library = ROOT / "yafsdp_fn"
    twice = [f"{entry}: one name for several classes" for entry in classes_of_one_name(library)]
    twice += [entry for file in sorted(library.rglob("*.py")) for entry in retired(file)]
    twice += given_elsewhere(library)
    for entry in twice:
        print(entry, file=sys.stderr)
    return int(bool(found or twice))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
