"""PTX text as functions of basic blocks.

Only what Triton emits: one module, registers in ranges, inline assembly with scopes of its own.
"""

import re
from dataclasses import dataclass, field

WIDTHS = {"pred": 0, "b8": 1, "b16": 2, "b32": 4, "b64": 8}
"""Bytes of registers; a predicate is a condition."""


@dataclass(frozen=True)
class Register:
    """A register by its number in the function, and its bytes."""

    index: int
    width: int


@dataclass(frozen=True)
class Address:
    """A register or a name, plus bytes."""

    base: "Register | str"
    offset: int = 0


Operand = Register | Address | int | str | tuple["Operand", ...]


@dataclass(frozen=True)
class Instruction:
    """``@guard opcode operands``; the parts of the opcode are those between its dots."""

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...] = ()
    guard: Register | None = None
    negated: bool = False

    def __str__(self) -> str:
        return ".".join(self.opcode) + " " + ", ".join(map(str, self.operands))


@dataclass
class Function:
    """A kernel or a function; its blocks are lists of instructions, entered at the first one."""

    name: str
    parameters: list[tuple[str, int]]
    """Names and bytes."""
    results: list[tuple[str, int]]
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: list[int] = field(default_factory=list)
    """Bytes of registers."""
    local: dict[str, int] = field(default_factory=dict)
    """Bytes of memory of each thread, by name."""


@dataclass(frozen=True)
class Module:
    """The functions of a PTX text and its constants."""

    functions: dict[str, Function]
    constants: dict[str, bytes]


FUNCTION = re.compile(
    r"\.(?:entry|func)\s+(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)[^;{]*(\{.*?^\}|;)", re.M | re.S
)
CONSTANT = re.compile(r"\.(?:global|const) [^;]*?([\w$]+)\[(\d+)\] = \{([^}]*)\};")
ENDS = {"bra", "ret", "exit", "bar", "barrier", "atom", "red"}
"""Instructions after which a block ends: lanes part, or wait, or others may come first."""


def parse(text: str) -> Module:
    """The functions and constants of a module."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"^\s*\.section.*?\{.*?^\s*\}", "", text, flags=re.M | re.S)
    text = re.sub(r"^\s*\.(loc|file)\b[^\n]*", "", text, flags=re.M)
    constants = {
        name: bytes(map(int, values.split(","))).ljust(int(size), b"\0")
        for name, size, values in CONSTANT.findall(text)
    }
    functions = {}
    for results, name, parameters, body in FUNCTION.findall(text):
        if body != ";":
            function = Function(name, _parameters(parameters), _parameters(results))
            _Body(function).read(body[1:-1])
            functions[name] = function
    return Module(functions, constants)


def _parameters(text: str) -> list[tuple[str, int]]:
    """Names and bytes of declared parameters, such as ``.param .align 16 .b8 name[16]``."""
    result = []
    for one in filter(str.strip, text.split(",")):
        kind, count = re.findall(r"\.[busf](\d+)", one)[-1], re.search(r"\[(\d+)\]", one)
        name = re.findall(r"[\w$]+", one.split("[")[0])[-1]
        result.append((name, int(kind) // 8 * int(count[1] if count else 1)))
    return result


class _Body:
    """Reads the statements of a function."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.scopes: list[dict[str, Register]] = [{}]
        self.block: list[Instruction] = []

    def read(self, text: str) -> None:
        start = 0
        for match in re.finditer(r"[;{}]", text):
            before, sign = text[start : match.start()].strip(), match[0]
            if before.endswith(":"):
                before = self._labels(before)
            if sign == ";":
                self._statement(before)
            elif before:
                continue  # a brace inside a statement: a vector
            elif sign == "{":
                self.scopes.append({})
            else:
                self.scopes.pop()
            start = match.end()
        self._labels(text[start:].strip())
        self._end_block()

    def _end_block(self) -> None:
        self.function.blocks.append(self.block)
        self.block = []

    def _labels(self, text: str) -> str:
        """What follows the labels at the beginning of a statement."""
        while match := re.match(r"([\w$]+):\s*", text):
            if not match[1].startswith("$L__tmp"):  # of the debugger
                if self.block:
                    self._end_block()
                self.function.labels[match[1]] = len(self.function.blocks)
            text = text[match.end() :]
        return text

    def _statement(self, text: str) -> None:
        text = self._labels(text)
        if text.startswith(".reg"):
            self._declare(text)
        elif text.startswith(".local"):
            name, size = re.search(r"([\w$]+)\[(\d+)\]", text).groups()
            self.function.local[name] = int(size)
        elif text and not text.startswith("."):
            self.block.append(self._instruction(text))
            if self.block[-1].opcode[0] in ENDS and self.block[-1].opcode[:2] != ("bar", "warp"):
                self._end_block()

    def _declare(self, text: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S).groups()
        width = WIDTHS[kind if kind == "pred" else "b" + kind[1:]]
        for name in re.split(r"\s*,\s*", names.strip()):
            prefix, count = re.fullmatch(r"([\w%$]+)(?:<(\d+)>)?", name).groups()
            for one in [prefix] if count is None else [f"{prefix}{i}" for i in range(int(count))]:
                self.scopes[-1][one] = Register(len(self.function.widths), width)
                self.function.widths.append(width)

    def _instruction(self, text: str) -> Instruction:
        guard, negated = None, False
        if match := re.match(r"@(!?)([\w%$]+)\s+", text):
            guard, negated = self._operand(match[2]), bool(match[1])
            text = text[match.end() :]
        opcode, _, rest = text.replace("\t", " ").partition(" ")
        parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s]+", rest)
        operands = tuple(self._operand(part) for part in parts)
        return Instruction(tuple(opcode.split(".")), operands, guard, negated)

    def _operand(self, text: str) -> Operand:
        text = text.strip()
        if text[0] in "{(":
            return tuple(self._operand(one) for one in re.split(r"\s*,\s*", text[1:-1].strip()))
        if text[0] == "[":
            base, _, offset = text[1:-1].partition("+")
            return Address(self._operand(base), int(offset.strip() or "0", 0))
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
            return int(text[2:], 16)  # the bits of a number
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return int(text.rstrip("U"), 0)
        return text
