"""`Trainer(strategy="zero3")`: the strategy's names, in the registries of both homes of Lightning.

Each home gets them once both it and `lightning_zero3` are imported, in whichever order. Importing `lightning_zero3`
imports neither, for those who do not use it.
"""

from __future__ import annotations

import sys
from importlib import import_module, util
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["register_strategies", "register_when_imported"]

START_METHODS = {"zero3": "popen", "zero3_spawn": "spawn", "zero3_fork": "fork", "zero3_notebook": "fork"}


def register_strategies(cls: type, registry: Any) -> None:
    """Make "zero3" and its siblings known to one of Lightning's registries."""
    for name, start_method in START_METHODS.items():
        if name not in registry:
            registry.register(
                name, cls, description=f"ZeRO stage 3, processes by {start_method}", start_method=start_method
            )


def register_when_imported(package: str, ours: str) -> None:
    """Import our module for a home of Lightning, which registers the strategies: now, or when that home is imported."""
    if package in sys.modules:
        import_module(ours)
    elif util.find_spec(package.partition(".")[0]) is not None:
        sys.meta_path.insert(0, _WhenImported(package, ours))


class _WhenImported:
    """An import hook that lets a package load as usual, and then imports a module of ours."""

    def __init__(self, package: str, ours: str) -> None:
        self._package, self._ours = package, ours

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._package:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: Any) -> None:
                load(module)
                import_module(self._ours)

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
