"""Settings of Sphinx: pages in Markdown, the reference from docstrings, fields of recipes from their declarations."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from importlib.metadata import version as installed
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

project, author, copyright = "secateurs", "the secateurs authors", "the secateurs authors"
version = release = installed("secateurs")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme, html_title = "furo", "secateurs"
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
exclude_patterns = ["_build"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
add_module_names = False
maximum_signature_line_length = 100
toc_object_entries = False


class RecipeFields(SphinxDirective):
    """A table of the fields of a settings class, with their defaults and meaning: `{recipe-fields} Recipe`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Build the table from the declarations in `secateurs.config`."""
        from secateurs import config

        kind = getattr(config, self.arguments[0])
        declared, default = config.declarations(kind), kind()  # which has the fields that depend on others filled in
        rows = [(name, repr(getattr(default, name)), d[2].help) for name, d in declared.items()]
        return [_table(("field", "default", "meaning"), rows)]


class RecordFields(SphinxDirective):
    """A table of the fields of a record, with the comments behind them in the source: `{record-fields} Step`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Build the table from the source of the class and its bases."""
        import secateurs

        kind = getattr(secateurs, self.arguments[0])
        sources = [inspect.getsource(base) for base in reversed(kind.__mro__) if base is not object]
        said = {m[1]: m[2] or "" for text in sources for m in re.finditer(r"^    (\w+): [^#\n]*(?:  # (.*))?$", text, re.M)}
        return [_table(("field", "is"), [(field.name, said.get(field.name, "")) for field in fields(kind)])]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> nodes.table:
    """A table whose columns but the last are code."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
    group += nodes.thead("", _row(head, code=0))
    group += nodes.tbody("", *(_row(row, code=len(head) - 1) for row in rows))
    return nodes.table("", group)


def _row(cells: tuple[str, ...], *, code: int) -> nodes.row:
    inner = [nodes.literal(text, text) if place < code else nodes.Text(text) for place, text in enumerate(cells)]
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", node)) for node in inner))


def as_restructured(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring, which is plain text with `code` and indented examples, as reStructuredText."""
    lines[:] = "\n\n".join(map(_paragraph, "\n".join(lines).strip("\n").split("\n\n"))).split("\n")


def _paragraph(text: str) -> str:
    if text.startswith("    "):
        return f"::\n\n{text}"
    parts = text.split("`")  # code is at the odd places
    return "".join(f"``{part}``" if place % 2 else re.sub(r"([*|\\_])", r"\\\1", part) for place, part in enumerate(parts))


def setup(app: Sphinx) -> None:
    """Register the directives and the filter of docstrings."""
    app.add_directive("recipe-fields", RecipeFields)
    app.add_directive("record-fields", RecordFields)
    app.connect("autodoc-process-docstring", as_restructured)
