"""Docstrings for the site: formulas, roles and examples of reStructuredText as Markdown.

An extension of griffe, which reads the docstrings for mkdocstrings.
"""

import re
from collections.abc import Mapping
from inspect import cleandoc
from typing import Any

from griffe import Alias, Extension, Module, Object

PUBLIC = (
    "topklass",
    "topklass.functional",
    "topklass.integrations",
    "topklass.compat",
    "topklass.metrics",
    "topklass.distributed",
    "topklass.data",
    "topklass.models",
    "topklass.report",
    "topklass.train",
)
"""The public modules; a name that several have leads to the first."""
DISPLAYED = re.compile(r"^\.\. math::(.+?)(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)
ROLE = re.compile(r":(func|class|meth|mod|data|attr):`([^`]+)`")


class MarkdownDocstrings(Extension):
    """Rewrites every docstring of the package."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """When all of the package is read."""
        names = {}
        for path in reversed(PUBLIC):
            module = pkg if path == pkg.path else pkg[path.removeprefix(f"{pkg.path}.")]
            exported = [str(name) for name in module.exports or module.members]
            names |= {name: f"{path}.{name}" for name in exported}
            for name in exported:
                prefer_function(module, name)
        rewrite(pkg, names)


def prefer_function(module: Module, name: str) -> None:
    """Let a name that a function shares with the file that defines it be the function."""
    member = module.members.get(name)
    if isinstance(member, Module) and name in member.members:
        module.set_member(name, Alias(name, target=member.members[name], parent=module))


def rewrite(parent: Object, names: Mapping[str, str]) -> None:
    """Rewrite the docstrings of an object and of all that it defines."""
    if parent.docstring:
        parent.docstring.value = markdown(parent.docstring.value, names)
    for member in parent.members.values():
        if not isinstance(member, Alias):
            rewrite(member, names)


def markdown(docstring: str, names: Mapping[str, str]) -> str:
    r"""The same docstring in Markdown.

    Example:
        >>> print(markdown(".. math:: a +\n    b\n\nSee :func:`f`, :class:`g`.", {"f": "m.f"}))
        $$
        a +
        b
        $$
        <BLANKLINE>
        See [`f`][m.f], `g`.
    """
    text = DISPLAYED.sub(lambda found: f"$$\n{cleandoc(found[1])}\n$$", docstring)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = ROLE.sub(lambda found: reference(found[2], names), text)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.M)


def reference(name: str, names: Mapping[str, str]) -> str:
    """A link to a public name, or the name alone.

    Example:
        >>> reference("topklass.f", {"f": "topklass.f"}), reference("torch.add", {})
        ('[`topklass.f`][topklass.f]', '`torch.add`')
    """
    path = names.get(name.rpartition(".")[2], "")
    return f"[`{name}`][{path}]" if path.endswith(name) else f"`{name}`"
