"""`zero3 plan`: from a LightningCLI YAML to a table of what each rank will take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_zero3.errors import Zero3Error
from lightning_zero3.report import human
from lightning_zero3.tools.plan import Plan, Rehearsal, largest_micro_batch
from lightning_zero3.weights import empty_parameters, rehearsal
from lightning_zero3.wrap import choose

__all__ = ["Planned", "comparison", "plan_config", "plot", "table", "variants_of"]

_DEFAULT_MODEL = "neox_lit.NeoXLightning"  # of a YAML without `class_path`, as those of neox-lit are


class Planned:
    """One configuration, planned for any micro-batch.

    Args:
        config: what the YAML holds: sections `trainer`, `model`, `data`.
        world_size: ranks.
        accelerator: "cpu" or "cuda".
    """

    def __init__(self, config: dict[str, Any], world_size: int, accelerator: str) -> None:
        trainer, data = config.get("trainer") or {}, config.get("data") or {}
        self.world_size, self.accelerator = world_size, accelerator
        self.precision = str(trainer.get("precision") or "32-true")
        self.micro_batches = int(trainer.get("accumulate_grad_batches") or 1)
        self._make_module = _maker(config)
        self.strategy = _strategy_options(trainer.get("strategy"))
        data = data.get("init_args", data)
        self.batch_size = int(data.get("batch_size") or 1)
        self._seq_len = data.get("seq_len")
        self.of = cache(self._of)

    def _of(self, batch_size: int) -> Plan:
        """The plan for micro-batches of `batch_size` samples."""
        return self._rehearsal.plan(lambda module: _batch(module, batch_size, self._seq_len))

    @cached_property
    def _rehearsal(self) -> Rehearsal:
        from lightning_zero3.strategy import Zero3Strategy

        try:
            return Rehearsal(
                self._make_module,
                world_size=self.world_size,
                strategy=Zero3Strategy(**self.strategy),
                precision=self.precision,
                micro_batches=self.micro_batches,
                accelerator=self.accelerator,
            )
        except (ValueError, OSError) as error:  # of the model: a setting, or a file that it needs
            raise Zero3Error(f"model: {error}") from error

    def blocks(self) -> set[type[nn.Module]]:
        """Classes of the model's blocks: what "auto" makes layers of, and that have parts."""
        with empty_parameters(), rehearsal():
            module = self._make_module()
            module.configure_model()
        return {type(m) for m in choose(module, "auto") if any(True for _ in m.children())}

    def offers(self) -> dict[str, dict[str, Any]]:
        """What the model itself offers to make it smaller: names, and keys of the configuration with their values."""
        with empty_parameters(), rehearsal():
            offers = getattr(self._make_module(), "plan_variants", dict)
        return offers()


def plan_config(path: str, changes: dict[str, Any]) -> Planned:
    """What a YAML plans.

    Args:
        path: of a YAML as `neox-lit fit --config` or another LightningCLI takes it.
        changes: dotted keys and their values, which replace those of the YAML.

    Raises:
        Zero3Error: no such file, no model in it, a strategy that is not Zero3Strategy, no number of devices.
    """
    file = Path(path)
    if not file.is_file():
        raise Zero3Error(f"{path}: no such file")
    try:
        config = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Zero3Error(f"{path} is not YAML: {error}") from error
    if not isinstance(config, dict):
        raise Zero3Error(f"{path} has no sections `trainer` and `model`")
    config = config.get("fit", config)
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = config
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[last] = value
    trainer = config.get("trainer") or {}
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes") or 1
    devices = len(devices) if isinstance(devices, list) else devices
    if not isinstance(devices, int) or devices < 1:
        raise Zero3Error(f"{path} has trainer.devices={devices!r}; say how many with --devices")
    accelerator = "cpu" if trainer.get("accelerator") == "cpu" else "cuda"  # of "gpu" and "auto", too
    return Planned(config, devices * nodes, accelerator)


def _maker(config: dict[str, Any]) -> Callable[[], Any]:
    """What makes the LightningModule, as LightningCLI would."""
    from jsonargparse import ArgumentParser
    from lightning.pytorch import LightningModule

    given = config.get("model")
    if not isinstance(given, dict):
        raise Zero3Error("the YAML has no section `model`")
    parser = ArgumentParser(exit_on_error=False)
    if "class_path" in given:
        parser.add_subclass_arguments(LightningModule, "model")
    else:
        module, _, name = _DEFAULT_MODEL.rpartition(".")
        parser.add_class_arguments(getattr(import_module(module), name), "model")
    try:
        parsed = parser.parse_object({"model": given})
    except Exception as error:  # jsonargparse has its own, which may wrap one of the model's
        raise Zero3Error(f"model: {error}") from error
    return lambda: parser.instantiate_classes(parsed).model


def _strategy_options(given: Any) -> dict[str, Any]:
    """The arguments of Zero3Strategy in a YAML."""
    from jsonargparse import ArgumentParser

    from lightning_zero3.strategy import Zero3Strategy

    name = given.get("class_path", "") if isinstance(given, dict) else str(given or "zero3")
    if not name.startswith("zero3") and not name.endswith("Zero3Strategy"):
        raise Zero3Error(f"trainer.strategy is {name}; what can be planned is zero3 (--set trainer.strategy=zero3)")
    options = dict(given.get("init_args") or {}) if isinstance(given, dict) else {}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Zero3Strategy, "strategy", skip={"accelerator", "parallel_devices"})
    try:
        parsed = parser.instantiate_classes(parser.parse_object({"strategy": options})).strategy
    except Exception as error:
        raise Zero3Error(f"trainer.strategy: {error}") from error
    return {name: getattr(parsed, name) for name in options}


def _batch(module: Any, batch_size: int, seq_len: int | None) -> Any:
    """What `training_step` will get."""
    if hasattr(module, "example_batch"):
        options = {"seq_len": seq_len} if "seq_len" in inspect.signature(module.example_batch).parameters else {}
        return module.example_batch(batch_size, **options)
    sample = module.example_input_array
    if sample is None:
        raise Zero3Error(
            f"{type(module).__name__} does not tell what a batch looks like. Give it a method "
            "example_batch(batch_size), or set self.example_input_array to one sample of what training_step gets."
        )
    return tree_map_only(Tensor, lambda t: torch.empty(batch_size, *t.shape[1:], dtype=t.dtype), sample)


def table(planned: Planned, batch_size: int, memory: int | None, bandwidth: int | None) -> str:
    """A plan for people."""
    found = planned.of(batch_size)
    lines = [str(found), f"with micro-batches of {batch_size} ({planned.micro_batches} a step) in {planned.precision}"]
    if bandwidth is not None:
        sent = found.traffic.fetch_bytes + found.traffic.reduce_bytes
        lines.append(f"at {human(bandwidth)}/s sending takes {sent / bandwidth:.2f} s, unless it hides behind compute")
    if memory is not None:
        lines.append(f"largest micro-batch in {human(memory)}: {largest_micro_batch(planned.of, memory)}")
    return "\n".join(lines)


def comparison(variants: dict[str, Planned], batch_size: int, memory: int | None) -> Iterator[str]:
    """What changes if the run is configured otherwise: a line for each variant, each made when it is asked for."""
    heads = ("states", "slots", "activations", "peak", "sent a step", *(["micro-batch"] if memory else []))
    yield " " * 28 + "".join(f"{head:>14}" for head in heads)
    for name, planned in variants.items():
        found = planned.of(batch_size)
        slots = found.report.slots[0]
        sent = found.traffic.fetch_bytes + found.traffic.reduce_bytes
        cells = [human(n) for n in (found.report.total[0] - slots, slots, found.activations, found.peak, sent)]
        if memory:
            cells.append(str(largest_micro_batch(planned.of, memory)))
        yield f"{name:<28}" + "".join(f"{cell:>14}" for cell in cells)


def variants_of(make: Callable[[dict[str, Any]], Planned], first: Planned) -> dict[str, Planned]:
    """The configuration itself, and what one would try to make it fit. `make` plans with some keys replaced."""
    found = {"as configured": first}
    blocks = first.blocks()
    if blocks and "activation_checkpointing_policy" not in first.strategy:
        checkpointed = make({})
        checkpointed.strategy["activation_checkpointing_policy"] = blocks
        found["activation checkpointing"] = checkpointed
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        if precision != first.precision:
            found[precision] = make({"trainer.precision": precision})
    for name, changes in first.offers().items():
        found[name] = make(changes)
    return found


def plot(planned: Planned, batch_size: int, path: str) -> None:
    """Draw memory per rank against the number of ranks: DDP, ZeRO stages 1 and 2 (arXiv:1910.02054, 5.1-5.2), and 3.

    Model states only: activations are the same for all, at the same micro-batch.

    Raises:
        Zero3Error: matplotlib is not installed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Zero3Error("--plot needs matplotlib: pip install matplotlib") from error
    report = planned.of(batch_size).report
    parameters, gradients, optimizer = report.parameters[1], report.gradients[1], report.optimizer[1]
    ranks = [2**i for i in range(max(4, planned.world_size.bit_length() + 1))]
    stages = {
        "DDP": [parameters + gradients + optimizer for _ in ranks],
        "ZeRO-1": [parameters + gradients + optimizer / n for n in ranks],
        "ZeRO-2": [parameters + (gradients + optimizer) / n for n in ranks],
        "ZeRO-3, with its slots": [
            (parameters + gradients + optimizer) / n + (report.slots[0] if n > 1 else 0) for n in ranks
        ],
    }
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, sizes in stages.items():
        axes.plot(ranks, [size / 2**30 for size in sizes], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="model states per rank, GiB")
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
