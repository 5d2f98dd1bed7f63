"""Compiles a traced graph with PyTorch's compiler, Inductor.

The graph is given to it directly. `torch.compile` would trace it a second time, and compare all inputs with those it
was traced for at every call, which took 0.14 to 0.19 ms on LeNet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import platformdirs
import torch
from torch import Tensor, fx

from leaktight.attacks.optimizers.unfold import unfolded

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The compiled graph, for tensors with the shapes and memory layouts of `inputs`. Nothing checks them.

    The compiler keeps its results where TORCHINDUCTOR_CACHE_DIR says, by default in the user's cache folder: the
    compiler's own default, the temporary folder, is lost with the next start of the machine.
    """
    # Imported here because they are slow to import. The last sets the variable to its own default.
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # isort: skip

    if os.environ.get(_CACHE) in (None, default_cache_dir()):
        os.environ[_CACHE] = str(platformdirs.user_cache_path("leaktight") / "compiled")
    on_cpu = all(tensor.device.type == "cpu" for tensor in inputs)
    # Without a context of a tracing, the compiler does not use its cache of graphs. In one, it would take the sizes of
    # real tensors for variables, and fails on networks with batch normalisation.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    examples: list[Tensor | int | torch.SymInt | None] = [
        mode.from_tensor(tensor, static_shapes=True) for tensor in inputs
    ]
    with torch.no_grad(), tracing(TracingContext(mode)):
        compiled: Callable[..., tuple[Tensor, ...]] = torch._inductor.compile(
            unfolded(graph) if on_cpu else graph, examples
        )
    return compiled
