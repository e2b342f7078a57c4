"""How much kernels do: instructions of warps by the unit that they keep busy, and bytes."""

from collections import Counter
from dataclasses import dataclass

from .parse import Function, Instruction

UNITS = {
    "shfl": "shuffle",
    "redux": "shuffle",
    "vote": "shuffle",
    "ldmatrix": "shared",
    "stmatrix": "shared",
    "bra": "control",
    "ret": "control",
    "call": "control",
    "bar": "barrier",
    "atom": "atomic",
    "red": "atomic",
    "mov": "move",
    "cvta": "move",
}
SPECIAL = {"ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh", "div"}
"""Functions of the special unit."""


@dataclass
class Launch:
    """What a launch did."""

    kernel: str
    grid: tuple[int, ...]
    instructions: Counter[str]
    """Of warps, by class."""
    bytes: Counter[str]
    """Loaded and stored globally."""


def class_of(instruction: Instruction) -> str:
    """The unit that an instruction keeps busy; moves cost nothing, as a rule."""
    name, *modifiers = instruction.opcode
    if name in UNITS:
        return UNITS[name]
    if name in ("ld", "st"):
        spaces = ("global", "shared", "local", "param")
        space = next(s for s in spaces if any(m.split("::")[0] == s for m in modifiers))
        return {"local": "shared", "param": "move"}.get(space, space)
    if "f64" in modifiers:
        return "fp64"
    if name in SPECIAL and modifiers[-1] == "f32":
        return "special"
    if name == "cvt":
        return "convert" if any("f" in kind for kind in modifiers[-2:]) else "int"
    return "fp32" if modifiers[-1] == "f32" else "int"


def classes_of(function: Function) -> list[Counter[str]]:
    """How many instructions of each class the blocks of a function have."""
    return [Counter(map(class_of, block)) for block in function.blocks]


def table(launches: list[Launch]) -> list[str]:
    """The work of all launches of each kernel, as text."""
    result = []
    for name in sorted({launch.kernel for launch in launches}):
        work: Counter[str] = Counter()
        for launch in launches:
            if launch.kernel == name:
                work += launch.instructions + launch.bytes
        result.append(f"{name}: " + ", ".join(f"{kind} {n}" for kind, n in sorted(work.items())))
    return result
