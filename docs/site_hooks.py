"""What `make site` adds to mkdocs: pages of files beside docs/, and the library's docstrings as Markdown.

    README.md, CONTRIBUTING.md, ...   a page each, README the first
    a linked *.py or *.ipynb          a page with its source, or its cells
    gallery/, cli.md                  pages that are made here: git does not hold them
    ::: ya.scan                       mkdocstrings' directive for where that name is defined
    "shape: ..." in a docstring       an entry of a list; ">>> ..." a block of code
    `ya.scan(...)` in prose           a link to its entry of the reference

Links are written as GitHub needs them, and rewritten here.
"""

from __future__ import annotations

import ast
import functools
import json
import posixpath
import re
import subprocess
import sys
import tempfile
from base64 import b64decode
from collections.abc import Sequence
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
PICTURE = re.compile(r'(?<=<p>)<img ([^>]*?)src="([^"]+)"([^>]*)>')
STANDS_FOR = {"README.md": "index.md", "docs/gallery/make.py": "gallery/index.md", "docs/cli.py": "cli.md"}
"""The page of a file, where it is not the file itself."""
LANGUAGES = {".py": "python", ".json": "json", ".cff": "yaml", ".toml": "toml"}


def page_of(path: str) -> str:
    """Returns the page, or the file of the site, that stands for a file of the repository."""
    if path in STANDS_FOR:
        return STANDS_FOR[path]
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
    """Adds the pages of files that have none in docs/: those that are made, those beside README.md, and all that pages
    link to."""
    pages = made()
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
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
            links = LINK.findall(CODE.sub("", str(pages.get(path.removeprefix("docs/"), "")) or source(path)))
            linked = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in links}
            todo |= {target for target in linked - done if (ROOT / target).is_file()}
    return files


def made() -> dict[str, str | bytes]:
    """Returns the pages of the gallery, its pictures and programs, and the page of commands: address -> content."""
    from docs.gallery import make

    found: dict[str, str | bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        make.write(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            found[f"gallery/{path.name}"] = path.read_bytes() if path.suffix == ".png" else path.read_text()
    said = subprocess.run([sys.executable, "-m", "docs.cli"], cwd=ROOT, capture_output=True, text=True, check=True)
    return found | {"cli.md": said.stdout}


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
        about, code = described(text) if path.endswith(".py") else ("", text)
        block = f"````{LANGUAGES.get(Path(path).suffix, '')}\n{code}````"
        return {page: f"# {Path(path).name}\n\n{about}\n\n`{path}`:\n\n{block}\n"}
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


def described(text: str) -> tuple[str, str]:
    """Returns the docstring of a script, as Markdown, and the code below it."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)[(tree.body[0].end_lineno or 0) if ast.get_docstring(tree) else 0 :]
    return markdown_of(ast.get_docstring(tree) or ""), "".join(lines).lstrip("\n")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = config.extra["paths"][page.file.src_uri]
    if path == "README.md":
        page.meta["hide"] = ["navigation"]  # it has no neighbours, and wide code
    elif not path.endswith((".md", ".ipynb")) or path.startswith("docs/coming_from/"):
        page.meta["hide"] = ["toc"]  # wide code, and tables of it
    elif path.startswith("docs/api/"):
        page.meta["search"] = {"boost": 4}  # a name's own entry before all that mention it
    text = rewritten(markdown, path)
    return DIRECTIVE.sub(directive, text)


@functools.cache
def definitions(package: str) -> dict[str, str]:
    """Returns where the names of a package are defined that it imports, at once or late: name -> dotted path."""
    folder = ROOT / package.replace(".", "/")
    file = next((file for file in map(folder.joinpath, ("__init__.pyi", "__init__.py")) if file.is_file()), None)
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(file.read_text() if file else "")):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "imported" and isinstance(node.args[1], ast.Dict):
            late: dict[str, str] = ast.literal_eval(node.args[1])  # where a layer above has the name: no import says it
            found |= {name: f"{module}.{name}" for name, module in late.items()}
    return found


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
    """Makes links of public names in prose, outside of code blocks, headings and links; and of pictures, to themselves:
    timelines are wide."""

    def link(match: re.Match[str]) -> str:
        name = match[1] or ""
        while name and name not in reference():
            name = name.rpartition(".")[0]
        if not name:
            return match[0]
        to = posixpath.relpath(reference()[name], posixpath.dirname(page.file.dest_uri) or ".")
        return f'<a href="{to}#{name}">{match[0]}</a>'

    return PICTURE.sub(r'<a href="\2"><img loading="lazy" \1src="\2"\3></a>', NAMED.sub(link, html))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Adds a way home to the page of addresses that are not there."""
    if template_name != "404.html":
        return output_content
    home = re.search(r'<a href="([^"]*index\.html)"', output_content)
    assert home is not None, "the theme's header leads to the first page"
    return output_content.replace("</h1>", f'</h1>\n<p><a href="{home[1]}">To the first page</a></p>', 1)


FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): ", re.M)


class Fields(griffe.Extension):
    """Docstrings as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(r"\bdocs/(\w+)\.md", r"[docs/\1.md](../\1.md)", obj.docstring.value)
            if isinstance(obj, griffe.Function):
                names = [each.name for each in obj.parameters]
            else:
                names = [name for name, each in obj.members.items() if not each.is_alias and each.is_attribute]
            obj.docstring.value = markdown_of(text, names)


def markdown_of(docstring: str, names: Sequence[str] = ()) -> str:
    """Returns a docstring as Markdown. names: of its arguments or fields, which begin entries also within a line"""
    if names:
        entry = rf"(?=(?:{'|'.join(names)})(?:, (?:{'|'.join(names)}))*: )"
        docstring = re.sub(rf"(?:;|(?<=\.))[ \n]\s*{entry}", "\n", docstring)
    return "\n\n".join(map(paragraph, docstring.split("\n\n")))


def paragraph(text: str) -> str:
    """Returns a paragraph of a docstring as Markdown: a line that begins with a name and a colon is an entry of
    a list, to which the indented lines below it belong."""
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if text.startswith("    ") or not FIELD.search(text):
        return text
    blocks: list[str] = []
    for line in text.split("\n"):
        entry, inside = FIELD.match(line), bool(blocks) and blocks[-1].startswith("- ")
        if entry:
            line = f"- **{entry[1]}**: {line[entry.end() :]}"
        if blocks and (line.startswith("    ") if inside else not entry):
            blocks[-1] += " " + line.strip()
        else:
            blocks.append(line)
    return re.sub(r"^(- .*)\n\n(?=- )", r"\1\n", "\n\n".join(blocks), flags=re.M)
