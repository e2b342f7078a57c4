"""What the site adds to the pages and docstrings; needs the extra ``docs``, so ``make docs``."""

import inspect
from types import SimpleNamespace

import pytest

import topklass.functional

griffe = pytest.importorskip("griffe", reason="pip install 'topklass[docs]'")
pytest.importorskip("latex2mathml", reason="pip install 'topklass[docs]'")
pytest.importorskip("mkdocs", reason="pip install 'topklass[docs]'")

from tools import site_docstrings, site_pages  # noqa: E402


@pytest.fixture(scope="module")
def package():
    extensions = griffe.load_extensions(site_docstrings.MarkdownDocstrings)
    return griffe.load("topklass", extensions=extensions, resolve_aliases=True)


def objects(parent):
    yield parent
    for member in parent.members.values():
        if not isinstance(member, griffe.Alias):
            yield from objects(member)


def test_no_markup_of_sphinx_is_left(package):
    for each in objects(package):
        text = each.docstring.value if each.docstring else ""
        for markup in (".. math", ":func:", ":class:", ":math:", ":mod:", ":meth:", "\nExample:\n"):
            assert markup not in text, f"{each.path}: {markup}"


def test_every_formula_can_be_typeset(package):
    formulas = []
    for each in objects(package):
        parts = each.docstring.value.split("$$") if each.docstring else []
        formulas += parts[1::2]
    assert len(formulas) > 20
    for formula in formulas:
        html = site_pages.with_formulas(rf'<div class="arithmatex">\[{formula}\]</div>')
        assert html.startswith("<math")


def test_an_unknown_command_in_a_formula_is_an_error():
    with pytest.raises(site_pages.PluginError, match="cannot typeset"):
        site_pages.with_formulas(r'<span class="arithmatex">\(\nosuch{a}\)</span>')


def test_a_function_wins_over_the_file_of_its_name(package):
    function = package["functional.topk_cross_entropy"]
    assert function.is_function
    assert list(inspect.signature(topklass.functional.topk_cross_entropy).parameters) == [
        parameter.name for parameter in function.parameters
    ]


def test_references_lead_to_public_names(package):
    text = package["losses.SmoothTopKLoss"].docstring.value
    assert "[`topklass.functional.smooth_topk_loss`][topklass.functional.smooth_topk_loss]" in text
    text = package["functional.hinge.convex_topk_hinge_loss"].docstring.value
    assert "[`topk_hinge_loss`][topklass.functional.topk_hinge_loss]" in text


def page(path):
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/x.css">',
        '<img alt="x" src="http://example/x.png">',
    ],
)
def test_loading_from_another_host_is_an_error(html):
    with pytest.raises(site_pages.PluginError, match="loads from another host"):
        site_pages.on_post_page(html, page("index.md"))


def test_links_to_another_host_are_not():
    html = '<a href="https://example.org">x</a> <img src="x.png"> <script src="a.js"></script>'
    assert site_pages.on_post_page(html, page("index.md")) == html


def test_the_command_has_all_its_subcommands():
    text = site_pages.on_page_markdown("<!-- topklass --help -->", page("reference/a.md"))
    for name in ("train", "evaluate", "predict", "sets", "compare", "check"):
        assert f"topklass {name}" in text
    assert "--label-smoothing" in text


def test_scripts_of_notebooks_are_left_out():
    html = '<p>a</p><script type="module">import("https://cdn.example/x.js")</script><p>b</p>'
    assert site_pages.on_page_content(html, page("notebooks/a.ipynb")) == "<p>a</p><p>b</p>"
    assert site_pages.on_page_content(html, page("a.md")) == html
