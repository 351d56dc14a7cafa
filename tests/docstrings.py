"""Refuses docstrings whose first sentence has no subject, and a class's name that the library uses twice:
`python -m tests.docstrings yafsdp_fn models`.

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


def main(paths: list[str]) -> int:
    """Prints headless sentences in `paths`, files or folders, and names of several classes; returns 1 if any."""
    files = [
        file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    ]
    found = [entry for file in sorted(files) for entry in headless(file)]
    for entry in found:
        print(entry)
    if found:
        print(f"{len(found)} docstrings begin with no subject: say first what the thing is or does", file=sys.stderr)
    twice = classes_of_one_name(ROOT / "yafsdp_fn")
    for entry in twice:
        print(f"{entry}: one name for several classes", file=sys.stderr)
    return int(bool(found or twice))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
