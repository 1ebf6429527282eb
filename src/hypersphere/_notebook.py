"""Results that a notebook displays as a page with tables and plots."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["NotebookResult"]


class NotebookResult:
    """Base of results that a notebook displays as a page, in a frame that isolates its styles from the notebook."""

    def _repr_html_(self) -> str:
        return self._report().result_page(self)._repr_html_()

    @staticmethod
    def _report() -> Any:
        # Imported at the first use, because the package `report` imports the packages that define results.
        return importlib.import_module("hypersphere.report")
