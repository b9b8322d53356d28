"""Compiled layers: torch.compile of the forward pass of each decoder layer, with the hooks of the layer outside.

Equal layers share one compilation, and pack lengths are symbolic, so packs of other lengths compile nothing. Not
compiled: attention of packed rows; the fused head; sparse blocks, whose experts get as many tokens as routers choose
(trainer/model/layers/routing.py may choose for them); recurrent layers, which run once per row.

ZeRO-3 gathers and frees weights in hooks, which cannot be compiled: it gathers a compiled layer as a whole
(`GATHERED_WHOLE`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from lockstep.rollout.errors import ConfigError
from lockstep.trainer.distributed.sharding import GATHERED_WHOLE
from lockstep.trainer.model.decoder import compilable_layers
from lockstep.trainer.model.layers import packed_attention
from lockstep.trainer.model.layers.experts import EXPERTS
from lockstep.trainer.setting import NOT_MEASURED

RECOMPILE_LIMIT = 64
"""Graphs of one function after which torch computes it without compilation; its default of 8 is too few for layers of
several kinds, each with and without gradients."""
FIRST_UPDATES = 3
"""Updates of a process in which graphs are compiled, for packs with and without gradients, prefixes or adapters."""
LATER_GRAPHS = 8
"""Graphs compiled after the first updates above which a warning is due."""


def compiled_layers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if GATHERED_WHOLE in vars(part)]


def compile_layers(model: nn.Module) -> None:
    """Compile the forward pass of each layer, in place; parameter names stay.

    Raises `ConfigError` if transformers marks no layers in this model, or only recurrent ones.
    """
    layers = compilable_layers(model)
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that transformers marks (GradientCheckpointingLayer), that are not "
            "recurrent and that leave experts to a block, so model.compile=true has nothing to compile; set "
            "model.compile=false"
        )
    packed_attention.hide_from_compiler()
    _set_limits()
    for block in (part for layer in layers for part in layer.modules() if EXPERTS in dict(part.named_children())):
        block.forward = torch.compiler.disable(block.forward)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)
        vars(layer)[GATHERED_WHOLE] = True


def _set_limits() -> None:
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    # Under DDP torch would cut the graph of a layer into buckets of gradients; a graph per layer overlaps as it is.
    config.optimize_ddp = False
    if torch.cuda.is_available():
        _compile_on_all_cores()


def _compile_on_all_cores() -> None:
    """Undo `import vllm`, which limits the compilation of kernels to one thread in this process, too."""
    from torch._inductor import config

    os.environ.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
    config.compile_threads = config.decide_compile_threads()


def described(module: nn.Module) -> str:
    """Return how many layers of which classes are compiled, as a line of the console."""
    classes = Counter(type(layer).__name__ for layer in compiled_layers(module))
    counts = ", ".join(f"{number} {name}" for name, number in classes.items())
    return f"compiled       {counts}; experimental: {NOT_MEASURED}; model.compile=false turns it off"


def num_graphs() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters  # runs without compiled layers do not load it

    return counters["stats"]["unique_graphs"]


class GraphCount:
    """Number of graphs over the updates of a run, `perf/compiled_graphs`."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """warn: receives one sentence when packs after the first updates are compiled again and again."""
        self._warn = warn
        self._num_updates = self._first_graphs = 0
        self._has_warned = False

    def metrics(self) -> dict[str, float]:
        """Return the metric; called once after each update."""
        graphs = num_graphs()
        self._num_updates += 1
        if self._num_updates <= FIRST_UPDATES:
            self._first_graphs = graphs
        elif graphs - self._first_graphs > LATER_GRAPHS and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"torch compiled {graphs - self._first_graphs} graphs after the first {FIRST_UPDATES} updates, "
                "where none are expected, and each takes seconds (perf/compiled_graphs); TORCH_LOGS=recompiles names "
                "the reasons, and model.compile=false ends it"
            )
        return {"perf/compiled_graphs": float(graphs)}
