"""torch.compile, block by block: a module that is sharded cannot be compiled as a whole."""

from __future__ import annotations

import os
import shutil

import torch

from neox_lit.errors import NeoXError
from neox_lit.model import NeoXModel


def check_backend(backend: str) -> None:
    """Raise for a backend that torch.compile does not know, or whose compiler is not on this machine.

    Raises:
        NeoXError: with what to do.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise NeoXError(f"model.compile_backend={backend!r} is not a backend of torch.compile: {', '.join(known)}")
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if backend == "inductor" and not any(shutil.which(name) for name in compilers):
        raise NeoXError(
            f"model.compile=true needs a C++ compiler, and there is no {' or '.join(compilers)} on PATH; install one, "
            "or set model.compile to false (or model.compile_backend to aot_eager, which compiles no code)"
        )


def compile_blocks(model: NeoXModel, backend: str) -> None:
    """Compile each transformer layer in place; they share the code, for they differ in weights only."""
    for block in model.blocks:
        block.compile(backend=backend)
