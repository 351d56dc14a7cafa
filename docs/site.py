"""What `make site` adds to mkdocs: pages of files beside docs/, and the library's docstrings as Markdown.

README.md, CONTRIBUTING.md, ...   a page each, README the first one; links are those that work on GitHub, rewritten
a linked *.py, *.ipynb, ...       a page with its source, or its cells
::: ya.scan                       mkdocstrings' directive for where that name is defined
"shape: ..." in a docstring       an entry of a list; ">>> ..." a block of code
`ya.scan(...)` in prose           leads to its entry of the reference
"""

from __future__ import annotations

import ast
import functools
import json
import posixpath
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(?=[)#])")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.S | re.M)
DIRECTIVE = re.compile(r"^::: (ya\.[\w.]+)$", re.M)
NAMED = re.compile(r"<(?:a|pre|h\d)\b.*?</(?:a|pre|h\d)>|<code>(ya\.[\w.]+)[^<]*</code>", re.S)
LANGUAGES = {".py": "python", ".json": "json", ".cff": "yaml", ".toml": "toml"}


def page_of(path: str) -> str:
    """Returns the page, or the file of the site, that stands for a file of the repository."""
    if path == "README.md":
        return "index.md"
    if path.endswith(".ipynb"):
        path = path.removesuffix(".ipynb") + ".md"
    elif Path(path).suffix in (".py", ".cff", ""):
        path += ".md"
    return path.removeprefix("docs/")


def rewritten(text: str, path: str) -> str:
    """Returns Markdown of the repository's file `path` with its links as the site needs them; code stays."""
    folder, page = posixpath.dirname(path), posixpath.dirname(page_of(path)) or "."

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        return posixpath.relpath(page_of(target), page)

    prose, codes = CODE.split(text), [*CODE.findall(text), ""]
    return "".join(LINK.sub(link, part) + code for part, code in zip(prose, codes, strict=True))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of files that have none in docs/: those beside README.md, and all that pages link to."""
    config.extra["paths"] = paths = {file.src_uri: f"docs/{file.src_uri}" for file in files}
    todo = {path for path in paths.values() if path.endswith(".md")} | {path.name for path in ROOT.glob("*.md")}
    done: set[str] = set()
    while todo:
        done.add(path := todo.pop())
        if (page := page_of(path)) not in paths:
            paths[page] = path
            for uri, content in contents(path, page).items():
                files.append(File.generated(config, uri, content=content))
        if path.endswith((".md", ".ipynb")):
            links = LINK.findall(CODE.sub("", source(path)))
            linked = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in links}
            todo |= {target for target in linked - done if (ROOT / target).is_file()}
    return files


def source(path: str) -> str:
    """Returns the text of a file of the repository as Markdown; of a notebook, that of its cells of prose."""
    text = (ROOT / path).read_text()
    if not path.endswith(".ipynb"):
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")


def contents(path: str, page: str) -> dict[str, str | bytes]:
    """Returns the page of a file, and its pictures, as files of the site: address in it -> content."""
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return {page: text}
    if not path.endswith(".ipynb"):
        return {page: f"# {Path(path).name}\n\n`{path}`\n\n````{LANGUAGES.get(Path(path).suffix, '')}\n{text}````\n"}
    cells: list[str] = []
    pictures: dict[str, str | bytes] = {}
    for cell in json.loads(text)["cells"]:
        code = "".join(cell["source"])
        cells.append(code if cell["cell_type"] == "markdown" else f"```python\n{code}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                cells.append(f"```\n{''.join(output['text'])}\n```")
            elif picture := output.get("data", {}).get("image/png"):
                name = f"{page.removesuffix('.md')}-{len(pictures)}.png"
                pictures[name] = b64decode("".join(picture))
                cells.append(f"![]({posixpath.basename(name)})")
    return {page: "\n\n".join(cells), **pictures}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = config.extra["paths"][page.file.src_uri]
    if path == "README.md":
        page.meta["hide"] = ["navigation"]  # it has no neighbours, and wide code
    text = rewritten(markdown, path)
    return DIRECTIVE.sub(directive, text)


@functools.cache
def definitions(package: str) -> dict[str, str]:
    """Returns where the names that a package imports from elsewhere are defined: name -> dotted path."""
    file = ROOT / package.replace(".", "/") / "__init__.py"
    tree = ast.parse(file.read_text() if file.is_file() else "")
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def defined(path: str) -> str:
    """Returns the dotted path of a public name's definition: griffe would take `yafsdp_fn.scan` for the module."""
    package, _, name = path.rpartition(".")
    found = definitions(package).get(name, path)
    return found if found == path else defined(found)


def directive(match: re.Match[str]) -> str:
    """Returns mkdocstrings' directive for a line `::: ya.optim.adamw`, under that name."""
    name = match[1]
    options = f"    options: {{heading: {name}, toc_label: {name.rpartition('.')[2]}}}"
    return f'<a id="{name}"></a>\n\n::: {defined(name.replace("ya", "yafsdp_fn", 1))}\n{options}\n'


@functools.cache
def reference() -> dict[str, str]:
    """Returns the page that a public name is on: "ya.scan" -> "api/training.html"."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return {name: f"api/{page.stem}.html" for page in pages for name in DIRECTIVE.findall(page.read_text())}


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links of public names in prose, outside of code blocks, headings and links."""

    def link(match: re.Match[str]) -> str:
        name = match[1] or ""
        while name and name not in reference():
            name = name.rpartition(".")[0]
        if not name:
            return match[0]
        to = posixpath.relpath(reference()[name], posixpath.dirname(page.file.dest_uri) or ".")
        return f'<a href="{to}#{name}">{match[0]}</a>'

    return NAMED.sub(link, html)


FIELDS = re.compile(r"^(\w+(?:, \w+)*): ", re.M)


class Fields(griffe.Extension):
    """Docstrings as Markdown: paragraphs of "shape: ..." become lists, and examples code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"\bdocs/(\w+)\.md", r"[docs/\1.md](../\1.md)", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(paragraph, text.split("\n\n")))


def paragraph(text: str) -> str:
    """Returns a paragraph of a docstring as Markdown; lines that begin one lower-case word and a colon are fields."""
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    lines = text.split("\n")
    first = next((k for k, line in enumerate(lines) if re.match(r"[a-z_]\w*(, [a-z_]\w*)*: ", line)), len(lines))
    if first == len(lines) or text.startswith("    "):
        return text
    fields = FIELDS.sub(lambda match: f"- **{match[1]}**: ", "\n".join(lines[first:]))
    return "\n".join([*lines[:first], "", fields] if first else [fields])
