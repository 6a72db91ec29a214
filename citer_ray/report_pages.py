"""HTML pages of an evaluation: `report.html` to explore, `learned.html` on what the router learned.

Each is one file without external assets: a template of `citer_ray/pages/` with its data put in as JSON.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from citer_ray.file_replacement import replacing
from citer_ray.learned import LearnedPage
from citer_ray.method_names import method_label
from citer_ray.report_schema import Report

_STYLE = "/*STYLE*/"
_PLACE = "/*DATA*/null"


def write_report_page(report: Report, path: Path) -> Path:
    """The report with axes and methods to choose."""
    labels = {name: method_label(name) for name in (*report.methods, *report.not_run)}
    return _write("report.html", {"report": report.model_dump(mode="json"), "labels": labels}, path)


def write_learned_page(page: LearnedPage, path: Path) -> Path:
    """Responses token by token, the tokens most often routed, and the reliability diagram."""
    return _write("learned.html", {**page.model_dump(mode="json"), "label": method_label(page.method)}, path)


def _write(template: str, data: dict[str, Any], path: Path) -> Path:
    pages = resources.files("citer_ray.pages")
    text = pages.joinpath(template).read_text(encoding="utf-8")
    style = pages.joinpath("style.css").read_text(encoding="utf-8")
    # Inside a script element `</` would end it, and U+2028 would end a line.
    content = json.dumps(data, ensure_ascii=True, allow_nan=False).replace("</", "<\\/")
    with replacing(path) as temporary:
        temporary.write_text(text.replace(_STYLE, style).replace(_PLACE, content), encoding="utf-8")
    return path
