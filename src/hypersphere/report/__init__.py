"""Reports: results as one self-contained HTML file, and tables in the terminal."""

from hypersphere._deprecation import deprecated_names
from hypersphere.report.bars import Bars
from hypersphere.report.curves import Curves
from hypersphere.report.figure import figure_svg
from hypersphere.report.filters import Filters
from hypersphere.report.groups import SideBySide, Stack, Tabs
from hypersphere.report.heatmap import HeatMap
from hypersphere.report.histogram import Distribution, Histogram
from hypersphere.report.landscape import Landscape
from hypersphere.report.page import Page, Section, page_html, write_page
from hypersphere.report.palette import class_colors
from hypersphere.report.projection import Projection, project
from hypersphere.report.series import Series
from hypersphere.report.spheres import Sphere, Spheres
from hypersphere.report.table import Column, Table, markdown
from hypersphere.report.terminal import print_table
from hypersphere.report.text import Text

__all__ = [
    "Bars",
    "Column",
    "Curves",
    "Distribution",
    "Filters",
    "HeatMap",
    "Histogram",
    "Landscape",
    "Page",
    "Projection",
    "Section",
    "Series",
    "SideBySide",
    "Sphere",
    "Spheres",
    "Stack",
    "Table",
    "Tabs",
    "Text",
    "class_colors",
    "figure_svg",
    "markdown",
    "page_html",
    "print_table",
    "project",
    "write_page",
]

__getattr__ = deprecated_names(__name__, {"Beside": "hypersphere.report:SideBySide"})
