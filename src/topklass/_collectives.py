"""What ranks that each hold a slice of the classes tell each other, and how that is differentiated.

All ranks compute the same loss, so its outgoing gradient is the same on all of them. Three
exchanges follow from that; each is the transpose of another, or its own:

====================  ==========================  =============================
exchange              forward pass                backward pass
====================  ==========================  =============================
:func:`gathered`      one tensor from each rank   each rank's own part: nothing to send
:func:`copied`        the tensor itself           the sum over ranks
:func:`summed`        the sum over ranks          the gradient itself
====================  ==========================  =============================

Messages must have the same size on all ranks, or they hang. :class:`Agreement` sees to it before
anything else is sent.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from topklass._checks import is_integer
from topklass._transforms import Saved, differentiable_once

Group = dist.ProcessGroup | None
"""None for all ranks."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LETTER_BYTES = 1024
"""The size of what ranks compare before a call, whatever it says."""
LONGEST_ERROR = 400
NO_SECOND_DERIVATIVE = (
    "what devices exchange has no second derivative: take the loss of all classes on one device "
    "where it is needed"
)


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A function at which ``torch.compile`` breaks the graph: it reads what ranks say."""
    result: Callable[Arguments, Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return result


class ClassShards:
    """Which classes each rank of a group holds.

    Slices are contiguous and in the order of ranks. Every rank must make one, at the same time: it
    compares the slices of all ranks. Give it in place of a process group.

    Args:
        classes: how many classes this rank holds, 0 or more; or, to have it checked, which ones:
            ``range(start, stop)``.
        group: the process group; None for all ranks.
        check_calls: compare the arguments of every call on all ranks, so that a difference is an
            error that says what differs. Without, a difference may end in a timeout or in wrong
            numbers, but a call saves one small exchange, for which a GPU has to wait if its group
            has no backend for the CPU.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ClassShards(range(0, 10))
        ClassShards(0 to 9 of 10 classes, rank 0 of 1)
        >>> dist.destroy_process_group()
    """

    group: Group
    rank: int
    sizes: tuple[int, ...]

    def __init__(
        self, classes: int | range, group: Group = None, *, check_calls: bool = True
    ) -> None:
        with Agreement("ClassShards", group) as agreed:
            if not isinstance(classes, range) and not (is_integer(classes) and classes >= 0):
                raise TypeError(
                    f"classes must be a number of classes or a range of them, got {classes!r}"
                )
            agreed.classes = classes if isinstance(classes, range) else int(classes)
        found = agreed.shards
        self.group, self.rank, self.sizes = found.group, found.rank, found.sizes
        self.check_calls = check_calls

    @classmethod
    def known(cls, sizes: tuple[int, ...], rank: int, group: Group) -> "ClassShards":
        """Slices that need no comparison."""
        self = cls.__new__(cls)
        self.group, self.rank, self.sizes, self.check_calls = group, rank, sizes, True
        return self

    @property
    def classes(self) -> int:
        """The number of all classes."""
        return sum(self.sizes)

    @property
    def start(self) -> int:
        """The first class of this rank."""
        return sum(self.sizes[: self.rank])

    @property
    def size(self) -> int:
        """How many classes this rank holds."""
        return self.sizes[self.rank]

    def __repr__(self) -> str:
        held = f"{self.start} to {self.start + self.size - 1}" if self.size else "none"
        return (
            f"ClassShards({held} of {self.classes} classes, rank {self.rank} of {len(self.sizes)})"
        )


class Agreement:
    """Ranks compare what a call is about, and all of them learn of an error of one.

    The body of its ``with`` checks the arguments and adds what must be equal on all ranks to
    ``facts``, and the classes of this rank as ``classes``. At its end one message of fixed size is
    exchanged. Afterwards ``shards`` has the classes of all ranks.
    """

    shards: ClassShards

    def __init__(self, function: str, group: Group | ClassShards) -> None:
        self.known = group if isinstance(group, ClassShards) else None
        self.group = group.group if isinstance(group, ClassShards) else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"{function}: this process is not a member of the given group")
        self.facts: dict[str, Any] = {"function": function}
        self.classes: int | range = 0

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        checked = self.known is None or self.known.check_calls
        if error is not None:
            if checked and isinstance(error, Exception):
                told = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
                self._exchange({**self.facts, "error": told})
            return
        if checked:
            held = self.classes
            slices = [held.start, held.stop] if isinstance(held, range) else [held]
            self.shards = self._compare(self._exchange({**self.facts, "classes": slices}))
        elif self.known is not None:
            if self.classes != self.known.size:
                raise ValueError(
                    f"{self.facts['function']}: local logits must have the {self.known.size} "
                    f"classes of this rank, as ClassShards has them, got {self.classes}"
                )
            self.shards = self.known

    def _exchange(self, letter: dict[str, Any]) -> list[dict[str, Any]]:
        """The letters of all ranks."""
        text = json.dumps(letter).encode()
        if len(text) > LETTER_BYTES:  # an error with characters that are not ASCII
            brief = {"function": self.facts["function"], "error": "see its own message"}
            text = json.dumps(brief).encode()
        device = _letter_device(self.group)
        sent = torch.frombuffer(bytearray(text.ljust(LETTER_BYTES)), dtype=torch.uint8).to(device)
        received = all_gather(sent, self.group).cpu()
        return [json.loads(bytes(each.tolist())) for each in received]

    def _compare(self, letters: list[dict[str, Any]]) -> ClassShards:
        for rank, letter in enumerate(letters):
            if "error" in letter:
                raise RuntimeError(
                    f"rank {rank} of {self.size} stopped in {letter['function']}, so rank "
                    f"{self.rank} stops too: {letter['error']}"
                )
        for name in self.facts:
            values = [letter.get(name) for letter in letters]
            if any(value != values[0] for value in values):
                other = next(rank for rank, value in enumerate(values) if value != values[0])
                raise ValueError(
                    f"{self.facts['function']}: {name} must be the same on all ranks, got "
                    f"{values[0]!r} on rank 0 and {values[other]!r} on rank {other}"
                )
        return ClassShards.known(self._sizes(letters), self.rank, self.group)

    def _sizes(self, letters: list[dict[str, Any]]) -> tuple[int, ...]:
        """How many classes each rank holds."""
        sizes: list[int] = []
        for rank, letter in enumerate(letters):
            *start, stop = letter["classes"]
            if start and (start[0] != sum(sizes) or stop < start[0]):
                raise ValueError(
                    f"the classes of rank {rank} must begin at {sum(sizes)}, where those of the "
                    f"ranks before it end, got {start[0]} to {stop - 1}: slices must neither "
                    f"overlap nor leave out classes"
                )
            sizes.append(stop - sum(start))
        if self.known is not None and tuple(sizes) != self.known.sizes:
            raise ValueError(
                f"{self.facts['function']}: local logits must have {self.known.sizes} classes on "
                f"the ranks, as ClassShards has them, got {tuple(sizes)}"
            )
        return tuple(sizes)


def fact(value: object) -> str:
    """A value in a few characters, different for different values."""
    text = str(value)
    return text if len(text) <= 50 else f"{text[:30]}… (#{sha256(text.encode()).hexdigest()[:12]})"


def _letter_device(group: Group) -> torch.device:
    """The CPU where the group has a backend for it: then no GPU has to wait."""
    backends = dist.get_backend_config(group)
    return torch.device("cpu" if "cpu:" in backends else torch.cuda.current_device())


@contextmanager
def naming_lost_ranks(group: Group) -> Iterator[None]:
    """Say in a sentence that another rank does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise dist.DistNetworkError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)} waits for another rank, "
            f"which has ended or did not answer within the group's timeout: {error}"
        ) from error


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """The tensors of all ranks, (W, …), without derivatives."""
    received = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    with naming_lost_ranks(group):
        dist.all_gather(list(received.unbind(0)), tensor.contiguous(), group=group)
    return received


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """The sum over ranks, without derivatives."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    with naming_lost_ranks(group):
        dist.all_reduce(total, group=group)
    return total


def gathered(tensor: Tensor, group: Group) -> Tensor:
    """The tensors of all ranks, (W, …), for what is the same on all ranks."""
    result: Tensor = _Gathered.apply(tensor, group)
    return result


def copied(tensor: Tensor, group: Group) -> Tensor:
    """The tensor, equal on all ranks, for what each rank does with it on its own."""
    result: Tensor = _Copied.apply(tensor, group)
    return result


def summed(tensor: Tensor, group: Group) -> Tensor:
    """The sum of the tensors of all ranks."""
    result: Tensor = _Summed.apply(tensor, group)
    return result


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.rank = dist.get_rank(group)
        return all_gather(tensor, group)

    @staticmethod
    @differentiable_once(NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, saved: Saved, outgoing: Tensor) -> tuple[Tensor, None]:
        return outgoing[ctx.rank], None


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @differentiable_once(NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, saved: Saved, outgoing: Tensor) -> tuple[Tensor, None]:
        return all_reduce(outgoing, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        return all_reduce(tensor, group)

    @staticmethod
    @differentiable_once(NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, saved: Saved, outgoing: Tensor) -> tuple[Tensor, None]:
        return outgoing, None
