"""Results that a notebook displays as a page with tables and plots."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["NotebookResult"]


class NotebookResult:
    """Gives a result the method with which notebooks display it, in a frame whose styles cannot reach the notebook."""

    def _repr_html_(self) -> str:
        return self._report().result_page(self)._repr_html_()

    @staticmethod
    def _report() -> Any:
        # Imported by name at the first use: the package that draws pages builds on the packages of the results.
        return importlib.import_module("hypersphere.report")
