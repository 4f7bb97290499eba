"""The files that a check leaves behind, besides what it prints."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.places import file_place, write_file
from parity import baseline
from parity.findings import Report
from parity.junit import junit


@dataclass(frozen=True)
class Files:
    """Where each of them goes; made before the check, so that a mistake is told before the work.

    BadInput where a file could not be written, or where the baseline is no report.
    """

    save: Path | None = None
    html: Path | None = None
    junit: Path | None = None
    baseline: Path | None = None
    old: dict[str, Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for path in (self.save, self.html, self.junit):
            if path is not None:
                file_place(path)
        if self.html is not None:
            import parity.html  # noqa: F401  (it needs an extra)
        if self.baseline is not None:
            object.__setattr__(self, "old", baseline.read(self.baseline))

    def write(self, report: Report, title: str) -> list[str] | None:
        """Writes each that is asked for; the changes since the baseline, if there is one."""
        changes = None if self.old is None else baseline.compare(self.old, report)
        if self.save is not None:
            write_file(self.save, json.dumps(report.to_json(), indent=1))
        if self.junit is not None:
            write_file(self.junit, junit(report))
        if self.html is not None:
            from parity.html import page

            write_file(self.html, page(report, title))
        return changes
