"""Runs the tests of ``tests/interpreted`` on the PTX of kernels, instead of Triton's interpreter.

``python -m pytest -p tests.ptx.plugin tests/interpreted/test_wide_states.py``
"""

import pytest

from .counts import table
from .launch import Settings, emulated


def pytest_addoption(parser: pytest.Parser) -> None:
    """How programs run, see :class:`Settings`."""
    group = parser.getgroup("ptx")
    group.addoption("--ptx-seed", type=int, default=0, help="order of programs and warps")
    group.addoption("--ptx-perturb", type=int, default=0, help="errors of approximations, in ulp")
    group.addoption("--ptx-capability", type=int, default=80, help="of the GPU: 80 or 90")
    group.addoption("--ptx-warps-apart", action="store_true", help="warps take turns")
    group.addoption("--ptx-counts", action="store_true", help="how much the kernels did")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Emulate from before the tests' own fixtures look for Triton's interpreter."""
    options = early_config.known_args_namespace
    settings = Settings(
        seed=options.ptx_seed,
        perturbation=options.ptx_perturb,
        warps_apart=options.ptx_warps_apart,
        capability=options.ptx_capability,
    )
    context = emulated(settings)
    early_config.stash[EMULATOR] = context.__enter__()
    early_config.add_cleanup(lambda: context.__exit__(None, None, None))


EMULATOR = pytest.StashKey()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much the kernels did."""
    config = terminalreporter.config
    if config.getoption("--ptx-counts"):
        for line in table(config.stash[EMULATOR].launches):
            terminalreporter.write_line(line)
