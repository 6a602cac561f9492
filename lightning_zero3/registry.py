"""`Trainer(strategy="zero3")`: the strategy's names, in the registries of both homes of Lightning.

`lightning.pytorch` gets them when `lightning_zero3` is imported. `pytorch_lightning` is another package with another
registry; it gets them when it is imported, before or after, and is not imported for those who do not use it.
"""

from __future__ import annotations

import sys
from importlib import import_module, util
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["register_strategies", "register_with_pytorch_lightning"]

START_METHODS = {"zero3": "popen", "zero3_spawn": "spawn", "zero3_fork": "fork", "zero3_notebook": "fork"}


def register_strategies(cls: type, registry: Any) -> None:
    """Make "zero3" and its siblings known to one of Lightning's registries."""
    for name, start_method in START_METHODS.items():
        if name not in registry:
            registry.register(
                name, cls, description=f"ZeRO stage 3, processes by {start_method}", start_method=start_method
            )


def register_with_pytorch_lightning() -> None:
    """Now if it is imported already, else when it will be."""
    if "pytorch_lightning" in sys.modules:
        import_module("lightning_zero3.pytorch_lightning")
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported:
    """An import hook that lets `pytorch_lightning` load as usual, and then registers the strategies."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "pytorch_lightning":
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: Any) -> None:
                load(module)
                import_module("lightning_zero3.pytorch_lightning")

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
