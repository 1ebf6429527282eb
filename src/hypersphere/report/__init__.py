"""The report: results as one self-contained HTML file, and its tables in the terminal."""

from hypersphere.report.draft import replacing
from hypersphere.report.page import Page, Section, page_html, write_page
from hypersphere.report.palette import class_colors
from hypersphere.report.spheres import Sphere, Spheres
from hypersphere.report.table import Column, Table, markdown
from hypersphere.report.terminal import print_table
from hypersphere.report.text import Text

__all__ = [
    "Column",
    "Page",
    "Section",
    "Sphere",
    "Spheres",
    "Table",
    "Text",
    "class_colors",
    "markdown",
    "page_html",
    "print_table",
    "replacing",
    "write_page",
]
