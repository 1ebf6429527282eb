"""Results that a notebook displays as a page with tables and plots."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["NotebookResult"]


class NotebookResult:
    """Gives a result the method with which notebooks display it, in a frame whose styles cannot reach the notebook."""

    def _repr_html_(self) -> str:
        # Imported by name at the first use: the package that draws pages builds on those of the results.
        report: Any = importlib.import_module("hypersphere.report")
        return report.result_page(self)._repr_html_()
