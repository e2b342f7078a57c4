"""PTX instructions as steps of threads; each is decoded once."""

from collections.abc import Callable

import numpy as np

from . import conversions, warps
from .floats import DTYPES, comparison, floating
from .integers import COUNTS, UNSIGNED, dtype_of, integer, with_carry
from .memory_steps import LOCAL, atomic, load, store
from .parse import Address, Function, Instruction, Module, Operand, Register
from .threads import Block, Code, Step, Threads, with_meetings

Array = np.ndarray
Getter = Callable[[Threads], Array]
CONSTANTS = 1 << 60
"""Where the constants of a module lie."""


def decode(module: Module, threads: int) -> dict[str, Code]:
    """The functions of a module, for so many threads that run together."""
    codes: dict[str, Code] = {}
    symbols, place = {"global_smem": 0}, CONSTANTS
    for name, data in module.constants.items():
        symbols[name] = place
        place += -(-len(data) // 16) * 16
    local = 0
    for function in module.functions.values():
        for name, size in function.local.items():
            symbols[name] = local
            local += -(-size // 16) * 16
    for function in module.functions.values():
        decoder = Decoder(function, symbols, codes, threads)
        blocks = with_meetings([decoder.block(block) for block in function.blocks])
        codes[function.name] = Code(
            function.name, blocks, function.widths, function.parameters, function.results, local
        )
    return codes


def number_type(kind: str) -> type:
    """The type of numbers of an instruction, by its name in PTX."""
    return DTYPES[kind] if kind in DTYPES else dtype_of(kind)


class Decoder:
    """Decodes the instructions of one function."""

    def __init__(
        self, function: Function, symbols: dict[str, int], codes: dict[str, Code], threads: int
    ) -> None:
        self.function, self.symbols, self.codes, self.threads = function, symbols, codes, threads

    def block(self, instructions: list[Instruction]) -> Block:
        """The steps of a block and how it ends."""
        if not instructions:
            return Block([])
        *rest, last = instructions
        steps = [self.step(one) for one in rest]
        name = last.opcode[0]
        if name in ("ret", "exit"):
            return Block(steps, self.guard(last), len(self.function.blocks))
        if name == "bra":
            return Block(steps, self.guard(last), self.function.labels[last.operands[0]])
        if name in ("bar", "barrier") and last.opcode[1] != "warp":
            if last.guard is not None or last.operands != (0,) or last.opcode != ("bar", "sync"):
                raise NotImplementedError(str(last))
            return Block(steps, pause="barrier")
        pause = "atomic" if name in ("atom", "red") else ""
        return Block([*steps, self.step(last)], pause=pause)

    def guard(self, instruction: Instruction) -> Getter | None:
        """The condition of an instruction."""
        if instruction.guard is None:
            return None
        index = instruction.guard.index
        if instruction.negated:
            return lambda t: ~t.frame.registers[index]
        return lambda t: t.frame.registers[index]

    def step(self, instruction: Instruction) -> Step:
        """What an instruction does."""
        try:
            step = self.unguarded(instruction)
        except (KeyError, ValueError) as error:
            raise NotImplementedError(str(instruction)) from error
        condition = self.guard(instruction)
        if condition is None:
            return step

        def guarded(t: Threads) -> None:
            before, chosen = t.mask, condition(t)
            t.mask = chosen if before is None else chosen & before
            if t.mask.all():
                t.mask = None
                step(t)
            elif t.mask.any():
                step(t)
            t.mask = before

        return guarded

    def unguarded(self, instruction: Instruction) -> Step:
        """What an instruction does where its condition holds."""
        name, *modifiers = instruction.opcode
        operands = instruction.operands
        if name in ("ld", "ldu"):
            return load(self, instruction)
        if name == "st":
            return store(self, instruction)
        if name in ("atom", "red"):
            return atomic(self, instruction)
        if name in ("shfl", "redux", "vote", "ldmatrix", "stmatrix", "bar"):
            return warps.step(self, instruction)
        if name == "call":
            return self.call(instruction)
        if name == "cvta":
            if modifiers != ["local", "u64"]:
                raise NotImplementedError(str(instruction))
            source = self.getter(operands[1], np.uint64)
            return self.result(operands[0], lambda x: x + np.uint64(LOCAL), [source])
        if name == "mov":
            return self.move(operands[0], operands[1], modifiers[-1])
        if name == "cvt":
            sources = [self.getter(one, conversions.carrier(modifiers[-1])) for one in operands[1:]]
            return self.result(operands[0], conversions.conversion(tuple(modifiers)), sources)
        kind = modifiers[-1]
        if name in ("setp", "set"):
            return self.compare(instruction)
        if name == "selp":
            chosen = [self.getter(one, number_type(kind)) for one in operands[1:3]]
            condition = self.getter(operands[3], np.bool_)
            return self.result(operands[0], lambda c, a, b: np.where(c, a, b), [condition, *chosen])
        if name.rstrip("c") in ("add", "sub", "mad") and (name[-1] == "c" or "cc" in modifiers):
            return self.carrying(instruction)
        if kind in DTYPES:
            sources = [self.getter(one, DTYPES[kind]) for one in operands[1:]]
            return self.result(operands[0], floating(instruction.opcode), sources)
        if kind.endswith("x2"):
            return self.pairs(instruction)
        kinds = [number_type(kind)] * (len(operands) - 1)
        for i in COUNTS.get(name, ()):
            kinds[i] = np.uint32
        if "wide" in modifiers and name == "mad":
            kinds[2] = dtype_of(f"{kind[0]}{2 * int(kind[1:])}")
        sources = [self.getter(o, k) for o, k in zip(operands[1:], kinds, strict=True)]
        return self.result(operands[0], integer(instruction.opcode), sources)

    def pairs(self, instruction: Instruction) -> Step:
        """Integers of 16 bits, two in a register: ``add.s16x2``."""
        *name, kind = instruction.opcode
        half, function = dtype_of(kind[:-2]), integer((*name, kind[:-2]))
        sources = [self.getter(one, np.uint32) for one in instruction.operands[1:]]
        return self.result(
            instruction.operands[0],
            lambda *values: function(*(value.view(half) for value in values)).view(np.uint32),
            sources,
        )

    def getter(self, operand: Operand, kind: type) -> Getter:
        """Reads an operand as numbers of a type; a wider register is cut."""
        if isinstance(operand, Register):
            index, dtype = operand.index, np.dtype(kind)
            if operand.width > dtype.itemsize and operand.width:
                unsigned = UNSIGNED[dtype.itemsize]
                full = UNSIGNED[operand.width]
                return lambda t: t.frame.registers[index].view(full).astype(unsigned).view(dtype)

            def read(t: Threads) -> Array:
                value = t.frame.registers[index]
                return value if value.dtype is dtype else value.view(dtype)

            return read
        if isinstance(operand, str) and operand.startswith("%"):
            return self.special(operand)
        number = self.symbols[operand] if isinstance(operand, str) else operand
        width = np.dtype(kind).itemsize
        unsigned = np.array(number % 2 ** (8 * width), UNSIGNED[width])
        constant = (unsigned != 0) if kind is np.bool_ else unsigned.view(kind)
        constant = np.full(self.threads, constant)
        return lambda t: constant

    def special(self, name: str) -> Getter:
        """Reads %tid.x, %ctaid.y and others."""
        if name == "%tid.x":
            return lambda t: t.numbers.astype(np.uint32)
        if name == "%laneid":
            return lambda t: (t.numbers % 32).astype(np.uint32)
        return lambda t: np.full(t.count, t.special[name], np.uint32)

    def result(self, to: Operand, function: Callable[..., Array], sources: list[Getter]) -> Step:
        """Writes a function of operands."""
        index = to.index
        if len(sources) == 1:
            (a,) = sources
            return lambda t: t.write(index, function(a(t)))
        if len(sources) == 2:
            a, b = sources
            return lambda t: t.write(index, function(a(t), b(t)))
        return lambda t: t.write(index, function(*[source(t) for source in sources]))

    def move(self, to: Operand, source: Operand, kind: str) -> Step:
        """Copy, or put together and take apart numbers."""
        if isinstance(to, tuple):
            parts = np.dtype(UNSIGNED[dtype_of(kind)().itemsize // len(to)])
            whole = self.getter(source, dtype_of(kind))

            def take_apart(t: Threads) -> None:
                values = whole(t).view(parts).reshape(t.count, -1)
                for i, one in enumerate(to):
                    if one != "_":
                        t.write(one.index, values[:, i].copy())

            return take_apart
        if isinstance(source, tuple):
            whole = dtype_of(kind)
            part = UNSIGNED[np.dtype(whole).itemsize // len(source)]
            return self.result(
                to,
                lambda *values: np.stack(values, 1).view(whole)[:, 0],
                [self.getter(one, part) for one in source],
            )
        return self.result(to, lambda value: value, [self.getter(source, UNSIGNED[to.width])])

    def compare(self, instruction: Instruction) -> Step:
        """Conditions, possibly with another one: ``setp.lt.and.f32 p, a, b, c``."""
        name, *modifiers = instruction.opcode
        kind = modifiers[-1]
        to, *operands = instruction.operands
        relation = comparison(modifiers[0], kind in DTYPES or kind == "bf16")
        sources = [self.getter(one, conversions.carrier(kind)) for one in operands[:2]]
        if kind == "bf16":
            of_singles, single = relation, conversions.from_bfloat16
            relation = lambda a, b: of_singles(single(a), single(b))  # noqa: E731
        if name == "set" or set(modifiers[1:-1]) - {"and", "or", "xor"}:
            raise NotImplementedError(str(instruction))
        if len(operands) == 2:
            return self.result(to, relation, sources)
        join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[modifiers[1]]
        sources.append(self.getter(operands[2], np.bool_))
        return self.result(to, lambda a, b, c: join(relation(a, b), c), sources)

    def carrying(self, instruction: Instruction) -> Step:
        """A sum that takes or leaves a carry."""
        to, *operands = instruction.operands
        function = with_carry(instruction.opcode)
        sources = [self.getter(one, np.uint32) for one in operands]

        def step(t: Threads) -> None:
            value, carry = function(*(source(t) for source in sources), t.carry)
            t.write(to.index, value)
            if "cc" in instruction.opcode:
                t.carry = carry

        return step

    def call(self, instruction: Instruction) -> Step:
        """Run a function without barriers."""
        results, name, arguments = instruction.operands

        def step(t: Threads) -> None:
            frame, code = t.frame, self.codes[name]
            given = zip(code.parameters, arguments, strict=True)
            t.enter(code, {inner: frame.parameters[outer] for (inner, _), outer in given})
            for pause in t.run():
                raise NotImplementedError(f"{pause} in {name}")
            for (inner, _), outer in zip(code.results, results, strict=True):
                frame.parameters[outer] = t.frame.parameters[inner]
            t.frame = frame

        return step

    def address(self, operand: Operand) -> Getter:
        """Reads an address, as a signed number."""
        if not isinstance(operand, Address):
            raise NotImplementedError(f"address {operand}")
        width = operand.base.width if isinstance(operand.base, Register) else 8
        base = self.getter(operand.base, UNSIGNED[width])
        if not operand.offset:
            return lambda t: base(t).astype(np.int64)
        offset = np.int64(operand.offset)
        return lambda t: base(t).astype(np.int64) + offset
