"""A Sphinx directive for ```` ```mermaid ```` blocks: drawn while the site is built, one drawing for each colour
scheme.

GitHub draws these blocks itself. The site contains finished SVG, so that readers need neither a script nor the network.
"""

from __future__ import annotations

import re
from typing import Any

import mermaidx
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

THEMES = {"only-light": "default", "only-dark": "dark"}
FONT = {"fontFamily": "DejaVu Sans, Verdana, sans-serif"}  # the drawing measures its text with this one


class Mermaid(SphinxDirective):
    """Replaces a block by its drawing. A block that cannot be drawn is a warning, which fails the build."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Called by docutils for each block."""
        source = "\n".join(self.content)
        try:
            drawings = [self._drawing(source, scheme, theme) for scheme, theme in THEMES.items()]
        except Exception as error:
            return [self.state.document.reporter.warning(f"mermaid cannot draw this block: {error}", line=self.lineno)]
        return [nodes.raw("", f'<div class="drawing">{"".join(drawings)}</div>', format="html")]

    def _drawing(self, source: str, scheme: str, theme: str) -> str:
        svg: str = mermaidx.render(source, theme=theme, config=FONT).svg()
        name = f"drawing-{self.env.docname.replace('/', '-')}-{self.lineno}-{theme}"
        old = re.search(r'<svg[^>]*\bid="([^"]+)"', svg)
        if old:  # ids of a page must differ, those inside the style sheet of a drawing too
            svg = svg.replace(old[1], name)
        return f'<div class="{scheme}">{svg}</div>'


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("mermaid", Mermaid)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
