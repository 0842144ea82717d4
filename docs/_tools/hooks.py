"""mkdocs hooks: generated pages join the site, links between the repository's files become links between pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api_pages import PACKAGES, api_pages, public_names
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
_CODE = re.compile(r"(<pre.*?</pre>|<a .*?</a>|<h[1-6].*?</h[1-6]>)|<code>(?P<name>forge(?:_[a-z]+)?\.[\w.]+)(?P<call>\(.*?\))?</code>", re.DOTALL)
_names: dict[str, str] = {}


def repository_pages() -> dict[str, str]:
    """File of the repository outside docs/ that is shown on the site too → its page below docs/."""
    pages = {f"packages/{folder}/README.md": f"packages/{folder}.md" for folder in PACKAGES.values()}
    pages["benchmarks/README.md"] = "benchmarks/index.md"
    pages |= {f"benchmarks/results/{path.name}": f"benchmarks/{path.name}" for path in ROOT.glob("benchmarks/results/*.md")}
    return pages | {f"examples/{path.parent.name}/README.md": f"examples/{path.parent.name}.md" for path in ROOT.glob("examples/*/README.md")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the API reference, and the pages of packages, benchmarks and examples."""
    for uri, text in api_pages(ROOT).items():
        files.append(File.generated(config, uri, content=text))
    for source, uri in repository_pages().items():
        text = (ROOT / source).read_text("utf-8")
        if source.startswith("examples/"):
            text += "".join(_listing(path) for path in sorted((ROOT / source).parent.glob("*.py")))
        files.append(File.generated(config, uri, content=text))
    for path in ROOT.glob("benchmarks/results/*.svg"):
        files.append(File.generated(config, f"benchmarks/{path.name}", abs_src_path=str(path)))
    _names.clear()
    _names.update(public_names(ROOT))
    return files


def _listing(path: Path) -> str:
    return f"\n## {path.name}\n\n```python\n{path.read_text('utf-8')}```\n"


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Lead links to files of the repository to their pages; unlink what the site does not show."""
    sources = repository_pages()
    here = next((source for source, uri in sources.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")

    def lead(link: re.Match[str]) -> str:
        target = link["target"]
        if not target or ":" in target or page.file.src_uri.startswith("api/"):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        uri = path.removeprefix("docs/") if path.startswith("docs/") else sources.get(path) or sources.get(f"{path}/README.md")
        if uri is not None:
            return f"[{link['text']}]({posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or '.')}{link['anchor'] or ''})"
        return link["text"] if (ROOT / path).exists() else link[0]

    return _LINK.sub(lead, markdown)


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Link qualified public names, such as `forge_data.prepare`, to their explanation."""

    def link(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None or name not in _names or _names[name] == page.file.src_uri:
            return match[0]
        target = files.get_file_from_path(_names[name])
        return match[0] if target is None else f'<a href="{target.url_relative_to(page.file)}#{name}">{match[0]}</a>'

    return _CODE.sub(link, html)
