"""No code that protects somebody draws from a generator that others can compute; the places that may are named."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import leaktight

ROOT = Path(leaktight.__file__).parent
FILES = (
    *sorted((ROOT / "defenses").rglob("*.py")),
    *sorted((ROOT / "crypto").rglob("*.py")),
    *(ROOT / name for name in ("fl/client.py", "fl/local.py", "fl/encrypted.py", "fl/fedboosting.py")),
    *(ROOT / name for name in ("models/keylock.py", "models/bottleneck.py", "core/secret.py")),
)
MAKING = {"public_numpy", "entropy", "global_seed", "default_rng", "manual_seed", "RandomState", "get_rng_state"}
DRAWING = {
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "multinomial"),
    *("normal_", "uniform_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_"),
    *("poisson", "dropout"),
}
OF_A_LIBRARY = {"normal", "random", "Generator"}
"""Public where they are PyTorch's or NumPy's: `stream.normal` is secret, and `collections.abc` has a Generator too."""
LIBRARIES = {"torch", "np", "numpy", "random"}

ALLOWED = {("models/bottleneck.py", "insert_bottleneck", "global_seed")}
"""(file, function, what it calls): initial weights of a part that all share, which the server sends out anyway."""


def drawings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The function and the name of everything that draws, or makes something that draws, from a public generator."""
    for function, node in _with_functions(tree, "module"):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names if _is_random(alias.name)]
            case ast.ImportFrom(module=str(module), names=names):
                known = DRAWING | OF_A_LIBRARY if module.partition(".")[0] in LIBRARIES else MAKING
                found = [alias.name for alias in names if _is_random(module) or alias.name in known - {"global_seed"}]
            case ast.Call(func=ast.Attribute(attr="public")) | ast.Attribute(value=ast.Name(id="rng"), attr="public"):
                found = ["public"]
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in LIBRARIES and name in OF_A_LIBRARY:
                found = [f"{owner}.{name}"]
            case ast.Attribute(attr=name) if name in MAKING | DRAWING:
                found = [name]
            case ast.Name(id=name, ctx=ast.Load()) if name in MAKING | DRAWING:
                found = [name]
            case _:
                found = []
        for name in found:
            yield function, name


def _is_random(module: str) -> bool:
    return module == "random" or module.startswith(("numpy.random", "random."))


def _with_functions(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield inside, child
        yield from _with_functions(child, inside)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_secrets_have_no_public_source(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = {(name, *drawing) for drawing in drawings(ast.parse(path.read_text()))}
    assert found <= ALLOWED


def test_every_exception_is_still_needed() -> None:
    found = {
        (str(path.relative_to(ROOT)), *drawing) for path in FILES for drawing in drawings(ast.parse(path.read_text()))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    [
        "torch.randn(3, generator=rng.public())",
        "torch.randn_like(x)",
        "draw = torch.randperm",
        "x.normal_()",
        "x.new_empty(3).uniform_()",
        "torch.normal(0.0, 1.0, (3,))",
        "np.random.default_rng(0)",
        "from numpy.random import default_rng",
        "import random",
        "from random import gauss",
        "with global_seed(rng): pass",
        "rng.public_numpy().normal(size=3)",
        "seed = rng.entropy(8)",
        "torch.nn.functional.dropout(x)",
        "torch.Generator()",
        "here.child('a').public()",
        "draw(rng.public)",
        "from torch import randn\nrandn(3)",
    ],
)
def test_what_it_would_find(line: str) -> None:
    assert list(drawings(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "stream.normal(3)",
        "keys.public",
        "from collections.abc import Generator",
        "rng.secret().permutation(5)",
        "rng.secret_bytes(8)",
    ],
)
def test_what_it_lets_pass(line: str) -> None:
    assert not list(drawings(ast.parse(line)))
