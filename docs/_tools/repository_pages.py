"""Files of the repository outside docs/ that the site shows as pages."""

from __future__ import annotations

from pathlib import Path

from api_pages import PACKAGES


def repository_pages(root: Path) -> dict[str, str]:
    """Path of each file → its page below docs/."""
    pages = {f"packages/{folder}/README.md": f"packages/{folder}.md" for folder in PACKAGES.values()}
    pages["benchmarks/README.md"] = "benchmarks/index.md"
    for result in sorted(root.glob("benchmarks/results/*.md")):
        pages[f"benchmarks/results/{result.name}"] = f"benchmarks/{result.name}"
    for readme in sorted(root.glob("examples/*/README.md")):
        pages[f"examples/{readme.parent.name}/README.md"] = f"examples/{readme.parent.name}.md"
    return pages


def page_text(root: Path, file: str) -> str:
    """Markdown of a file's page: an example's is followed by its code."""
    text = (root / file).read_text("utf-8")
    scripts = sorted((root / file).parent.glob("*.py")) if file.startswith("examples/") else []
    return text + "".join(f"\n## {script.name}\n\n```python\n{script.read_text('utf-8')}```\n" for script in scripts)
