"""Check built distributions: ``python tools/check_wheel.py dist``.

The wheel must contain every file of ``src/topklass`` and nothing else. It is installed into an
environment that has PyTorch and PyTorch's own dependencies, linked from the environment that runs
this script, and no other package. There ``wheel_smoke_test.py`` runs.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from venv import EnvBuilder

ROOT = Path(__file__).parent.parent
SMOKE_TEST = ROOT / "tools" / "wheel_smoke_test.py"


def main(folder: Path) -> None:
    """Check the one wheel and the one sdist in ``folder``."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    check_contents(wheel, sdist, version)
    with tempfile.TemporaryDirectory() as name:
        python = environment_with("torch", Path(name) / "venv")
        # Never with dependencies: pip would write through the links.
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "--no-index", "--no-deps", wheel.resolve()], check=True)
        smoke = [python, "-I", SMOKE_TEST, ROOT / "README.md", version]
        sys.exit(subprocess.run(smoke, cwd=name).returncode)


def check_contents(wheel: Path, sdist: Path, version: str) -> None:
    """Compare both archives with the files of this checkout."""
    source = files_below("src/topklass")
    with zipfile.ZipFile(wheel) as archive:
        packed = {x for x in archive.namelist() if ".dist-info/" not in x}
        metadata = archive.read(f"topklass-{version}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    core = {x for x in required if "extra ==" not in x}
    if core != {"torch>=2.6"}:
        sys.exit(f"the core must require torch>=2.6 alone, but it requires {sorted(core)}")
    if relative := re.findall(r"\]\((?!https?://|#)(.*?)\)", metadata):
        sys.exit(f"links that lead nowhere on PyPI: {relative}")
    same("wheel", packed, {x.removeprefix("src/") for x in source})

    folders = ["tests", "benchmarks", "experiments", "examples", "docs", "tools"]
    other = {x for folder in folders for x in files_below(folder)}
    single = {"Makefile", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"}
    single.add("mkdocs.yml")
    with tarfile.open(sdist) as archive:
        names = {x.name.removeprefix(f"topklass-{version}/") for x in archive if x.isfile()}
    same("sdist", names - {"PKG-INFO", ".gitignore"}, source | other | single | {"pyproject.toml"})


def files_below(folder: str) -> set[str]:
    """Files that git tracks, or would: a build leaves out what git ignores."""
    options = ["--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        ["git", "ls-files", *options, folder], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {x for x in listed.stdout.splitlines() if (ROOT / x).exists()}


def same(what: str, packed: set[str], expected: set[str]) -> None:
    """Exit with the difference, if there is one."""
    if packed != expected:
        lacks, has = sorted(expected - packed), sorted(packed - expected)
        sys.exit(f"the {what} lacks {lacks} and should not have {has}")


def environment_with(name: str, path: Path) -> Path:
    """A new environment with one installed package and its dependencies, and its Python."""
    EnvBuilder(with_pip=True, symlinks=True).create(path)
    (packages,) = path.glob("lib/python*/site-packages")
    for found in with_dependencies(name):
        for file in found.files or []:
            top = file.parts[0]
            if top != ".." and not (packages / top).exists():
                (packages / top).symlink_to(Path(found.locate_file(top)).resolve())
    return path / "bin" / "python"


def with_dependencies(name: str) -> list[Distribution]:
    """An installed distribution and all that it requires, as far as it is installed."""
    found: dict[str, Distribution] = {}
    names = [name]
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        try:
            found.setdefault(name, distribution(name))
        except PackageNotFoundError:  # for another system, or of an extra
            continue
        for line in found[name].requires or []:
            required = re.match(r"[\w.-]+", line)
            if required and "extra ==" not in line and required[0].lower() not in found:
                names.append(required[0])
    return list(found.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
