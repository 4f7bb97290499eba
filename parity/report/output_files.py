"""The files that a check leaves behind, besides what it prints."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtwin.configs import BadInput
from jaxtwin.configs.atomic_write import file_place, write_file
from jaxtwin.parity.report import baseline
from jaxtwin.parity.report.junit import junit
from jaxtwin.parity.report.results import Report


@dataclass(frozen=True)
class Files:
    """Where each of them goes; made before the check, so that a mistake is told before the work.

    BadInput where a file could not be written, where two would go to one place, or where the
    baseline is no report. The baseline may be replaced by --save, for it is read before.
    """

    save: Path | None = None
    html: Path | None = None
    junit: Path | None = None
    baseline: Path | None = None
    replay: Path | None = None  # a folder, which the check writes
    old: dict[str, Any] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for path in (self.save, self.html, self.junit):
            if path is not None:
                file_place(path)
        self._apart()
        if self.html is not None:
            import jaxtwin.parity.report.html  # noqa: F401  (it needs an extra)
        if self.baseline is not None:
            object.__setattr__(self, "old", baseline.read(self.baseline))

    def _apart(self) -> None:
        """No place is given twice. A pipe or a device takes any number of texts."""
        taken: dict[Path, str] = {}
        for name in ("save", "html", "junit", "baseline", "replay"):
            path = getattr(self, name)
            if path is None or "\0" in str(path):  # which is told where it is opened
                continue
            place = Path(os.path.realpath(path))
            if place.exists() and not place.is_file():
                continue
            first = taken.setdefault(place, name)
            if first != name and (first, name) != ("save", "baseline"):
                raise BadInput(f"--{first} and --{name} both name {path}; give each its own")

    def write(self, report: Report, title: str) -> list[str] | None:
        """Writes each that is asked for; the changes since the baseline, if there is one."""
        changes = None if self.old is None else baseline.compare(self.old, report)
        if self.save is not None:
            write_file(self.save, json.dumps(report.to_json(), indent=1))
        if self.junit is not None:
            write_file(self.junit, junit(report))
        if self.html is not None:
            from jaxtwin.parity.report.html import page

            write_file(self.html, page(report, title))
        return changes
