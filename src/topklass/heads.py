"""The last layer for losses with margins: scores that are cosines."""

from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topklass._checks import check_count, check_number
from topklass.functional._contract import working


def autocasting(x):
    return torch.is_autocast_enabled(x.device.type)


class CosineClassifier(nn.Module):
    r"""Scores that are cosines between features and a vector for each class, times a scale.

    .. math:: s_c = \gamma \, \frac{\langle x, w_c \rangle}{\|x\| \, \|w_c\|}
        \in [-\gamma, \gamma]

    (Wang et al. 2018; Cao et al. 2019; Garcin et al. 2022, section 4.5). A vector of length 0 has
    cosine 0 with everything.

    Use it in place of the last ``nn.Linear`` where margins, or noise, must have a fixed size
    compared with the scores. :class:`topklass.NoisedTopKLoss` and :class:`topklass.LDAMLoss` multiply
    by a scale themselves, after noise and margin: leave it at 1 here. Cross-entropy and the smooth
    loss have none: take about 16 to 64 here.

    Cosines are computed in float32 at least, also under autocast, where they are the result.

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
        """Draw vectors of length about 1 in directions that are all alike."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.log_scale is not None:
            nn.init.constant_(self.log_scale, log(self.initial_scale))

    @property
    def scale(self) -> float | Tensor:
        """γ, a number, or a tensor if it is learnt."""
        return self.initial_scale if self.log_scale is None else working(self.log_scale).exp()

    def forward(self, input: Tensor) -> Tensor:
        """Map features (…, in_features) to scores (…, out_features)."""
        if not autocasting(input):
            return self._scores(input).to(input.dtype)
        with torch.autocast(input.device.type, enabled=False):
            return self._scores(input)

    def _scores(self, input: Tensor) -> Tensor:
        cosines = F.linear(_unit(working(input)), _unit(working(self.weight)))
        return cosines.clamp(-1.0, 1.0) * self.scale

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"scale={self.initial_scale}, learn_scale={self.log_scale is not None}"
        )


def _unit(vectors: Tensor) -> Tensor:
    """Vectors of length 1 in the same directions; those of length 0 stay."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    unit: Tensor = vectors / length.masked_fill(length == 0, 1.0)
    return unit
