"""What long-tailed data need: margins, weights and priors of classes, and cosine scores."""

from collections.abc import Sequence
from math import inf, log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from topklass._checks import (
    check_count,
    check_logits,
    check_number,
    check_same_device,
    class_dimension,
    is_integer,
    is_number,
)
from topklass._transforms import can_read_values, is_dtensor
from topklass.functional._contract import result_dtype


def class_margins(counts: Tensor | Sequence[float], largest: float = 0.2) -> Tensor:
    r"""A margin for each class, larger for rarer classes.

    .. math:: m_y = m_{\max} \Big( \frac{n_{\min}}{n_y} \Big)^{1/4}

    (Cao et al. 2019; Garcin et al. 2022, section 3.3), where n_min is the count of the rarest class
    that has samples. A class without samples gets the largest margin.

    Args:
        counts: number of training samples of each class, (C).
        largest: margin m_max of the rarest class; 0.2 in Garcin et al., section 4.5.

    Returns:
        (C), floating point, in (0, largest].

    Example:
        >>> import torch
        >>> class_margins(torch.tensor([1, 16, 0]))
        tensor([0.2000, 0.1000, 0.2000])
    """
    check_number("largest", largest, positive=False)
    return largest * _rarity(counts) ** 0.25


def class_weights(counts: Tensor | Sequence[float], beta: float = 0.9999) -> Tensor:
    r"""A weight for each class by its effective number of samples, larger for rarer classes.

    .. math:: w_c \propto \frac{1 - \beta}{1 - \beta^{n_c}}, \qquad \frac1C \sum_c w_c = 1

    (Cui et al. 2019, equation 4). β = 0 gives every class the same weight, β → 1 weights that are
    inversely proportional to the counts. A class without samples gets the weight of the rarest
    class that has some.

    Use them as the ``weight`` of a loss. Large weights from the start hurt the features that a
    network learns: :class:`topklass.DeferredReweighting` turns them on late.

    Args:
        counts: number of training samples of each class, (C).
        beta: β, from 0 to below 1: samples beyond about 1/(1 − β) hardly count.

    Returns:
        (C), floating point, positive, with mean 1.

    Example:
        >>> import torch
        >>> class_weights(torch.tensor([1, 10, 100]))
        tensor([2.7025, 0.2704, 0.0272])
    """
    if not is_number(beta) or not 0 <= beta < 1:
        raise ValueError(f"beta must be a number from 0 to below 1, got beta={beta!r}")
    log_beta = log(beta) if beta else -inf
    weights = 1 / -torch.expm1(without_zeros(counts) * log_beta)
    return weights / weights.mean()


def without_zeros(counts: Tensor | Sequence[float]) -> Tensor:
    """Counts in floating point, 0 replaced by the smallest other count, or by +inf."""
    counts = torch.as_tensor(counts)
    if counts.dim() != 1 or counts.numel() == 0:
        raise ValueError(f"counts must be a vector, one per class, got shape {tuple(counts.shape)}")
    if can_read_values(counts) and not bool((counts >= 0).all()):
        raise ValueError(f"counts must not be negative, got {counts[~(counts >= 0)][0].item()}")
    counts = counts if counts.is_floating_point() else counts.to(torch.get_default_dtype())
    rarest = counts.masked_fill(counts == 0, inf).amin()
    return torch.where(counts == 0, rarest, counts)


def _rarity(counts: Tensor | Sequence[float]) -> Tensor:
    """The count of the rarest class over that of each, in (0, 1]; 1 for a class without samples."""
    seen = without_zeros(counts)
    return (seen.amin() / seen).nan_to_num(1.0)


class CosineClassifier(nn.Module):
    r"""Last layer whose scores are cosines between features and a vector for each class.

    .. math:: s_c = \gamma \, \frac{\langle x, w_c \rangle}{\|x\| \, \|w_c\|}
        \in [-\gamma, \gamma]

    (Wang et al. 2018; Cao et al. 2019; Garcin et al. 2022, section 4.5). A vector of length 0 has
    cosine 0 with everything.

    Use it in place of the last ``nn.Linear`` where margins, or noise, need a fixed size relative to
    the scores. :class:`topklass.NoisedTopKLoss` and :class:`topklass.LDAMLoss` multiply by a scale
    themselves, after noise and margin: leave it at 1 here. Cross-entropy and the smooth loss have
    none: take about 16 to 64 here.

    Cosines are computed in float32 at least. Under autocast the result is float32, too.

    Args:
        in_features: length of the features.
        out_features: number of classes.
        scale: γ, positive.
        learn_scale: whether γ is learnt, as the exponential of a parameter that starts at log γ.

    Example:
        >>> head = CosineClassifier(3, 2)
        >>> _ = head.weight.data.copy_(torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 4.0]]))
        >>> head(torch.tensor([[5.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
        tensor([[1.0000, 0.0000],
                [0.0000, 0.8000]], grad_fn=<MulBackward0>)
    """

    log_scale: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scale: float = 1.0,
        learn_scale: bool = False,
    ) -> None:
        super().__init__()
        check_count("in_features", in_features)
        check_count("out_features", out_features)
        check_number("scale", scale, positive=True)
        self.in_features = in_features
        self.out_features = out_features
        self.initial_scale = scale
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("log_scale", nn.Parameter(torch.empty(())) if learn_scale else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw vectors of length about 1 in uniformly distributed directions."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, log(self.initial_scale))

    @property
    def scale(self) -> float | Tensor:
        """γ, a number, or a tensor if it is learnt."""
        return self.initial_scale if self.log_scale is None else _float32(self.log_scale).exp()

    def forward(self, features: Tensor) -> Tensor:
        """Map features (…, in_features) to scores (…, out_features)."""
        device = features.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self._scores(features).to(features.dtype)
        with torch.autocast(device, enabled=False):
            return self._scores(features)

    def _scores(self, features: Tensor) -> Tensor:
        cosines = F.linear(_unit(_float32(features)), _unit(_float32(self.weight)))
        return cosines.clamp(-1.0, 1.0) * self.scale

    def extra_repr(self) -> str:
        """Show the arguments."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"scale={self.initial_scale}, learn_scale={self.log_scale is not None}"
        )


def _float32(tensor: Tensor) -> Tensor:
    """In float32, or float64 if it is that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1 in the same directions; those of length 0 stay."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    unit: Tensor = vectors / length.masked_fill(length == 0, 1.0)
    return unit


class _AroundLoss(nn.Module):
    """Holds a loss, and something for each class."""

    criterion: nn.Module

    @property
    def dim(self) -> int:
        """The class dimension, that of the loss, or 1 if it does not say."""
        return getattr(self.criterion, "dim", 1)

    @property
    def temperature(self) -> float:
        """What the loss divides logits by, or 1 if it does not say."""
        return getattr(self.criterion, "temperature", 1.0)

    def _check_counts(self, logits: Tensor, per_class: Tensor) -> None:
        """Find wrong counts in the first step, not in the first in which they matter."""
        classes = check_logits(logits, self.dim)
        if classes != len(per_class):
            raise ValueError(
                f"there are counts for {len(per_class)} classes, but the logits have {classes} "
                f"(torch.bincount(labels, minlength={classes}) counts them all)"
            )


class DeferredReweighting(_AroundLoss):
    """A loss whose classes are weighted from some epoch on (Cao et al. 2019, Algorithm 1).

    Before the epoch ``start`` the criterion is unchanged. From then on its ``weight`` is that of
    :func:`topklass.class_weights`, times its own if it has one. Call ``set_epoch`` in every epoch.
    The state dict says whether the weights are on.

    Use it for long-tailed data, around a loss with margins per class, and turn the weights on where
    the learning rate is lowered, after about 80 % of the epochs: features are learnt best from
    unweighted data, the last layer from weighted classes. Weights are on in ``eval()`` mode too.

    Args:
        criterion: any loss that takes a ``weight`` for each class, of topklass or of
            :mod:`torch.nn`.
        counts: number of training samples of each class.
        start: first epoch, as ``set_epoch`` counts them, in which the classes are weighted.
        beta: see :func:`topklass.class_weights`.

    Example:
        >>> import torch
        >>> counts = torch.tensor([1000, 100, 10])
        >>> criterion = DeferredReweighting(nn.CrossEntropyLoss(), counts, start=160)
        >>> for epoch in (0, 160):
        ...     criterion.set_epoch(epoch)
        ...     print(criterion(torch.eye(3), torch.tensor([1, 1, 2])))
        tensor(0.8848)
        tensor(0.6351)
    """

    class_weights: Tensor

    def __init__(
        self,
        criterion: nn.Module,
        counts: Tensor | Sequence[float],
        start: int,
        beta: float = 0.9999,
    ) -> None:
        super().__init__()
        if not isinstance(criterion, nn.Module) or "weight" not in criterion._buffers:
            raise TypeError(
                f"criterion must be a loss with a weight for each class, "
                f"got {type(criterion).__name__}, which has no buffer named weight"
            )
        _check_epoch("start", start)
        self.criterion = criterion
        self.register_buffer("class_weights", class_weights(counts, beta))
        own = criterion._buffers["weight"]
        if own is not None and own.shape != self.class_weights.shape:
            raise ValueError(
                f"counts must have one value for each class, {tuple(own.shape)} as the "
                f"criterion's weight, got shape {tuple(self.class_weights.shape)}"
            )
        self.start = start
        self.active = start == 0

    def set_epoch(self, epoch: int) -> None:
        """Turn the weights on if ``epoch`` is ``start`` or later, and off if not."""
        _check_epoch("epoch", epoch)
        self.active = epoch >= self.start

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the criterion, with weights if they are on."""
        if args:
            self._check_counts(args[0], self.class_weights)
        if not self.active:
            return self.criterion(*args, **kwargs)
        own = self.criterion._buffers["weight"]
        weight = self.class_weights if own is None else self.class_weights * own
        return functional_call(self.criterion, {"weight": weight}, args, kwargs)

    def get_extra_state(self) -> dict[str, bool]:
        """Whether the weights are on, for the state dict."""
        return {"active": self.active}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        """Take it from a state dict."""
        self.active = state["active"]

    def extra_repr(self) -> str:
        """Show the start and whether the weights are on."""
        return f"start={self.start}, active={self.active}"


def _check_epoch(name: str, value: int) -> None:
    """Require the number of an epoch."""
    if not is_integer(value) or value < 0:
        raise ValueError(f"{name} must be a non-negative integer, got {name}={value!r}")


class LogitAdjustment(_AroundLoss):
    r"""A loss of logits to which the logarithms of the class frequencies are added.

    .. math:: \ell'(s, y) = \ell(s + t T \log \pi, y), \qquad \pi_c = n_c / \sum_j n_j

    (Menon et al. 2021, equation 10, where ℓ is cross-entropy), with the temperature T by which the
    loss divides logits. The network learns what the
    frequencies do not tell. With cross-entropy and strength t = 1, the class of the largest logit
    is the best guess for accuracy averaged over classes. So predict from the logits, unadjusted.

    Use it for long-tailed data, around a loss without weights or margins per class, which correct
    the same thing. To combine it with :class:`topklass.DeferredReweighting`, put it outside.

    A class without samples counts as the rarest class that has some: at log 0 it would be absent,
    and its logit would not be learnt. Like other losses this one is the same in ``eval()`` mode, so
    that losses of training and validation data with the same frequencies can be compared. On
    balanced data take the loss without adjustment, ``loss.criterion(logits, target)``.

    Args:
        criterion: any loss of logits, of topklass or of :mod:`torch.nn`. The class dimension is its
            attribute ``dim``, or 1 if it has none; T is its attribute ``temperature``, or 1.
        counts: number of training samples of each class.
        strength: t, non-negative; 0 is the criterion itself.

    Example:
        >>> import torch
        >>> criterion = LogitAdjustment(nn.CrossEntropyLoss(), torch.tensor([900, 90, 10]))
        >>> criterion(torch.zeros(3), torch.tensor(2))  # -log(10 / 1000)
        tensor(4.6052)
    """

    log_prior: Tensor

    def __init__(
        self, criterion: nn.Module, counts: Tensor | Sequence[float], strength: float = 1.0
    ) -> None:
        super().__init__()
        if not isinstance(criterion, nn.Module):
            raise TypeError(
                f"criterion must be a loss module, such as nn.CrossEntropyLoss(), "
                f"got {criterion!r} ({type(criterion).__name__})"
            )
        check_number("strength", strength, positive=False)
        self.criterion = criterion
        self.register_buffer("log_prior", (-_rarity(counts).log()).log_softmax(0))
        self.strength = strength

    def forward(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the criterion with the adjusted logits and all other arguments."""
        self._check_counts(logits, self.log_prior)
        check_same_device(logits, log_prior=self.log_prior)
        return self.criterion(self._adjusted(logits), *args, **kwargs)

    def _adjusted(self, logits: Tensor) -> Tensor:
        """Added in float32 at least, and rounded to the precision in which losses are returned."""
        shape = [1] * logits.dim()
        shape[class_dimension(logits, self.dim)] = -1
        wide = _float32(logits)
        prior = self.strength * self.temperature * self.log_prior.to(wide.dtype).view(shape)
        if is_dtensor(wide):
            from torch.distributed.tensor import DTensor, Replicate

            mesh = wide.device_mesh
            prior = DTensor.from_local(prior, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return (wide + prior).to(result_dtype(logits))

    def extra_repr(self) -> str:
        """Show the strength and the number of classes."""
        return f"strength={self.strength}, log_prior=<{len(self.log_prior)} values>"
