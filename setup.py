"""The pages of docs/ become package data, leaktight/docs. All other settings of the build are in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithDocs(build_py):
    """Copies the pages where they are installed; an editable install reads those of the checkout."""

    def _pages(self) -> dict[str, str]:
        pages = [] if self.editable_mode else sorted(Path("docs").rglob("*.md"))
        return {str(page): str(Path(self.build_lib, "leaktight", page)) for page in pages}

    def run(self) -> None:
        super().run()
        for page, target in self._pages().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(page, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._pages().values()]


setup(cmdclass={"build_py": WithDocs})
