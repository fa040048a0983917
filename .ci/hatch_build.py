"""What hatch does before it builds a wheel or an sdist: it sees to it that the inspector's page is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PAGE = Path("compiler/inspect/page/page.html")


class PageHook(BuildHookInterface):
    """Refuses to build without the page, which git does not hold. An editable install may lack it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # In an unpacked sdist the folders stand where the repository has links to them.
        if version != "editable" and not (Path(self.root, ".src/monarch") / PAGE).is_file():
            raise FileNotFoundError(f"{PAGE} has not been built: run 'make setup'")
