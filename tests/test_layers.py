"""A layer imports only what stands below it, and the core imports nothing but PyTorch."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from call_trace import files_of_a_call

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "topklass"

# From the top to the bottom. Layers of one row do not import each other.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["report"],
    ["train"],
    ["data", "models"],
    ["_provenance"],  # records the version
    ["topklass"],  # __init__.py: what users import
    ["compat", "integrations", "metrics"],
    ["sets", "distributed"],
    ["prediction"],
    ["longtail"],
    ["baseline_losses", "linear_losses"],
    ["losses"],
    ["functional"],
    ["operators"],
    ["dispatch"],
    ["kernels", "reference"],
    ["_collectives"],
    ["_targets"],
    ["_checks"],
    ["_transforms", "_extras", "_files", "_lists"],
]
HEIGHT = {layer: -row for row, layers in enumerate(LAYERS) for layer in layers}

# Tables and limits that kernels take from the reference.
EXCEPTIONS = {
    ("kernels", "topklass.reference.expected_tables"),
    ("kernels", "topklass.reference.power_sums.kept_out"),
    ("kernels", "topklass.reference.power_sums.LARGEST_K_IN_FLOAT32"),
}

# These need an extra. All other layers are the core.
EXTRAS = {"cli", "report", "train", "data", "models", "metrics"}
INSTALLED_WITH_TORCH = {"torch", "typing_extensions"}
WITH_TRITON = {"dispatch", "kernels"}

# The file, its layer, the line, and the module or the member of a module that it imports.
Import = tuple[str, str, int, str]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(name: str) -> str:
    """``functional`` for ``topklass.functional.smooth``; names of __init__.py are ``topklass``."""
    top = name.split(".")[:2]
    return top[-1] if ".".join(top) in MODULES else "topklass"


def imports() -> Iterator[Import]:
    """All imports of the package, those inside functions and for types included."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}:{node.lineno}: write an absolute import"
                targets = [f"{node.module}.{each.name}" for each in node.names]
            else:
                continue
            for target in targets:
                yield str(path.relative_to(ROOT)), layer_of(name), node.lineno, target


IMPORTS = list(imports())


def test_every_module_has_a_layer():
    assert {layer_of(name) for name in MODULES} == set(HEIGHT)


def test_a_layer_imports_only_what_stands_below_it():
    wrong = [
        f"{file}:{line}: {layer} imports {target}"
        for file, layer, line, target in IMPORTS
        if target.split(".")[0] == "topklass"
        and layer_of(target) != layer
        and (layer, target) not in EXCEPTIONS
        and HEIGHT.get(layer, 1) <= HEIGHT.get(layer_of(target), 1)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_needed():
    found = {(layer, target) for _, layer, _, target in IMPORTS}
    assert found >= EXCEPTIONS, EXCEPTIONS - found


def test_the_core_imports_nothing_but_torch():
    wrong = [
        f"{file}:{line}: {layer} imports {target}"
        for file, layer, line, target in IMPORTS
        if layer not in EXTRAS
        and target.split(".")[0]
        not in sys.stdlib_module_names
        | INSTALLED_WITH_TORCH
        | {"topklass"}
        | ({"triton"} if layer in WITH_TRITON else set())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "experiments", "tests", "tools"])
def test_nothing_imports_what_is_not_in_the_wheel(folder):
    assert not [x for x in IMPORTS if x[3].split(".")[0] == folder]


def test_the_smooth_loss_passes_through_nine_files_on_the_cpu():
    passed = files_of_a_call()
    assert "losses.py" in passed
    assert len(passed) <= 9, "\n".join(passed)
