"""Every public name has a docstring with an example, and a place in the reference."""

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import topklass

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
MODULES = {
    "topklass": topklass.__all__,
    **{
        f"topklass.{name}": import_module(f"topklass.{name}").__all__
        for name in (
            "functional",
            "compat",
            "distributed",
            "metrics",
            "data",
            "models",
            "train",
            "report",
        )
    },
    "topklass.integrations": ["hf_loss"],
}
SUBMODULES = {"compat", "functional", "integrations"}
"""Names of the package that are modules with pages of their own."""
SAME = {"topklass.functional.topk_accuracy": "topklass.topk_accuracy"}
"""Names that stand in two modules, and where they are documented."""
NAMES = [
    f"{module}.{name}"
    for module, names in MODULES.items()
    for name in names
    if module != "topklass" or name not in SUBMODULES
]
WITHOUT_EXAMPLE = re.compile(
    r"topklass\.(distributed\.sharded_.*"  # the module has one; these need processes
    r"|data\.(Pictures|FORMATS|IMAGENET|read_cifar)"  # a protocol, constants, downloaded files
    r"|report\.(write_report|Report)"  # the page of topklass.train has one for them and these:
    r"|train\.(?!build_loss|load_recipe|prepare_data|Recipe).*)"
)


def documented() -> list[str]:
    pages = [page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md")]
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]


def test_the_reference_has_every_public_name_once():
    assert sorted(documented()) == sorted({SAME.get(name, name) for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_docstring(name):
    module, _, attribute = name.rpartition(".")
    public = getattr(import_module(module), attribute)
    if not callable(public):
        return
    text = inspect.getdoc(public) or ""
    assert text
    assert not text.startswith(f"{attribute}(")  # not what dataclass writes
    if not WITHOUT_EXAMPLE.fullmatch(name):
        assert ">>> " in text
