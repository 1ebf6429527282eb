"""Reports: results as one self-contained HTML file, charts for notebooks, and tables in the terminal."""

from hypersphere._deprecation import deprecated_names
from hypersphere.report import charts
from hypersphere.report.charts import Series, figure_svg
from hypersphere.report.images import Images
from hypersphere.report.measured import run_result
from hypersphere.report.neurons import angle_chart, inspection_page, layer_table
from hypersphere.report.page import (
    Chart,
    Page,
    Section,
    SideBySide,
    Stack,
    Tabs,
    Text,
    join_pages,
    page_html,
    write_page,
)
from hypersphere.report.palette import class_colors
from hypersphere.report.recipes import RecipeResults, recipe_page, summary_table, write_recipe_page
from hypersphere.report.results import accuracy_chart, evaluation_table, result_page, strength_chart
from hypersphere.report.runs import RunResult, run_page
from hypersphere.report.spheres import Projection, Sphere, Spheres, project
from hypersphere.report.tables import Column, Table, best_cells, markdown, print_table

__all__ = [
    "Chart",
    "Column",
    "Images",
    "Page",
    "Projection",
    "RecipeResults",
    "RunResult",
    "Section",
    "Series",
    "SideBySide",
    "Sphere",
    "Spheres",
    "Stack",
    "Table",
    "Tabs",
    "Text",
    "accuracy_chart",
    "angle_chart",
    "best_cells",
    "charts",
    "class_colors",
    "evaluation_table",
    "figure_svg",
    "inspection_page",
    "join_pages",
    "layer_table",
    "markdown",
    "page_html",
    "print_table",
    "project",
    "recipe_page",
    "result_page",
    "run_page",
    "run_result",
    "strength_chart",
    "summary_table",
    "write_page",
    "write_recipe_page",
]

__getattr__ = deprecated_names(
    __name__, {"Beside": "hypersphere.report:SideBySide", "Filters": "hypersphere.report:Images"}
)
