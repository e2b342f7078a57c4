"""Networks: parameter counts by formula, shapes, heads, gradients and names."""

from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topklass import CosineClassifier
from topklass.models import DenseNet, available, build, count_parameters, small_resnet
from topklass.models.adapt import find_head, replace_head, take_grey

OWN = ["convnet", "densenet40-12", "densenet40-40-bc", "resnet18-small"]
LARGE = ["densenet40-40", "resnet50-small", "resnet50"]
OTHERS = ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5"]

networks = pytest.mark.parametrize("name", OWN + OTHERS)
both_heads = pytest.mark.parametrize("head", ["linear", "cosine"])
cases = pytest.mark.parametrize(
    ("name", "channels", "head"),
    [
        (name, *case)
        for name, case in zip(
            OWN + OTHERS,
            cycle([(1, "linear"), (3, "cosine"), (3, "linear"), (1, "cosine")]),
            strict=False,
        )
    ],
)
"""Each network with one kind of images and of head, and all of these."""
both_channels = pytest.mark.parametrize("channels", [1, 3])


def scores_of(network: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return network.eval()(images)


# Parameters


def of_densenet(depth: int, growth: int, classes: int, bottleneck: bool) -> int:
    """Weights of convolutions, two numbers for each normalised channel, and the classifier."""
    layers = (depth - 4) // (6 if bottleneck else 3)
    width = 2 * growth if bottleneck else 16
    total = 3 * 9 * width
    for block in range(3):
        if block:
            narrow = width // 2 if bottleneck else width
            total += 2 * width + width * narrow
            width = narrow
        seen = layers * width + growth * layers * (layers - 1) // 2
        inner = 4 * growth
        if bottleneck:
            total += 2 * seen + inner * seen + layers * (2 * inner + 9 * inner * growth)
        else:
            total += 2 * seen + 9 * growth * seen
        width += layers * growth
    return total + 2 * width + (width + 1) * classes


@pytest.mark.parametrize(
    ("depth", "growth", "bottleneck", "millions"),
    [
        (40, 12, False, 1.0),
        (100, 12, False, 7.0),
        (100, 24, False, 27.2),
        (100, 12, True, 0.8),
        (250, 24, True, 15.3),
        (190, 40, True, 25.6),
    ],
)
def test_parameters_of_densenets_are_those_of_the_paper(depth, growth, bottleneck, millions):
    """Huang et al. 2017, table 2, for 10 classes."""
    with torch.device("meta"):
        count = count_parameters(DenseNet(depth, growth, classes=10, bottleneck=bottleneck))
    assert count == of_densenet(depth, growth, 10, bottleneck)
    assert round(count / 1e6, 1) == millions


def of_resnet18(classes: int, stem: int) -> int:
    total, width = 3 * stem**2 * 64 + 2 * 64, 64
    for out in (64, 128, 256, 512):
        total += 9 * out * width + 3 * 9 * out * out + 4 * 2 * out
        if out != width:
            total += out * width + 2 * out
        width = out
    return total + (width + 1) * classes


def of_convnet(classes: int, channels: int, width: int) -> int:
    convolutions = 25 * channels * width + 9 * (2 + 4 + 8 + 16) * width**2
    return convolutions + 2 * 13 * width + (4 * width + 1) * classes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("convnet", of_convnet(100, 3, 32)),
        ("densenet40-12", of_densenet(40, 12, 100, False)),
        ("densenet40-40", of_densenet(40, 40, 100, False)),
        ("densenet40-40-bc", of_densenet(40, 40, 100, True)),
        ("resnet18", of_resnet18(100, 7)),
        ("resnet18-small", of_resnet18(100, 3)),
    ],
)
def test_parameters_by_formula(name, expected):
    with torch.device("meta"):
        assert count_parameters(build(name, 100)) == expected


@pytest.mark.parametrize("name", [*OWN, *LARGE[:2]])
def test_lines_tell_the_number_of_parameters(name):
    with torch.device("meta"):
        network = build(name, 100)
    told = float(available()[name].split("; ")[1].split(" M")[0])
    count = count_parameters(network.features if name == "convnet" else network)
    assert abs(told - count / 1e6) <= (0.005 if name == "convnet" else 0.05)


# Shapes


@cases
def test_shapes(name, channels, head):
    network = build(name, 7, channels=channels, head=head)
    assert network.training
    for size in (32, 45):
        assert scores_of(network, torch.randn(2, channels, size, size)).shape == (2, 7)
    assert scores_of(network, torch.randn(0, channels, 32, 32)).shape == (0, 7)


@both_heads
@both_channels
@pytest.mark.parametrize("name", LARGE)
def test_shapes_of_large_networks(name, channels, head):
    with torch.device("meta"):
        network = build(name, 7, channels=channels, head=head, image_size=32)
        assert network(torch.zeros(2, channels, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(("name", "smallest"), [("convnet", 1), ("densenet40-12", 4)])
def test_smallest_images(name, smallest):
    assert build(name, 7, image_size=smallest).training
    if smallest > 1:
        with pytest.raises(ValueError, match="DenseNet cannot take images of 3×3: "):
            build(name, 7, image_size=smallest - 1)


@pytest.mark.parametrize(("name", "size"), [("vit_b_16", 48), ("maxvit_t", 448)])
def test_networks_of_one_size(name, size):
    """On the meta device these shapes are all there is."""
    with torch.device("meta"):
        network = build(name, 7, channels=1, image_size=size)
        assert scores_of(network, torch.zeros(2, 1, size, size)).shape == (2, 7)
        with pytest.raises((AssertionError, RuntimeError)):
            network(torch.zeros(2, 1, 32, 32))


def test_images_that_are_too_small():
    with torch.device("meta"), pytest.raises(ValueError, match="cannot take images of 32×32"):
        build("inception_v3", 7, image_size=32)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_no_auxiliary_scores(name):
    with torch.device("meta"):
        network = build(name, 7)
        assert network(torch.zeros(2, 3, 96, 96)).shape == (2, 7)


@pytest.mark.parametrize("name", OTHERS)
def test_grey_is_grey_in_colour(name):
    torch.manual_seed(1)
    colour = build(name, 7)
    torch.manual_seed(1)
    grey = build(name, 7, channels=1)
    images = torch.randn(2, 1, 64, 64)
    expected = scores_of(colour, images.expand(2, 3, 64, 64))
    torch.testing.assert_close(scores_of(grey, images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network", [nn.Linear(3, 2), nn.Conv2d(4, 2, 3)])
def test_no_convolution_of_colours(network):
    with pytest.raises(ValueError, match="needs a first convolution of 3 channels"):
        take_grey(network)


def test_colours_that_are_shifted_one_by_one():
    with torch.device("meta"), pytest.raises(ValueError, match=r"GoogLeNet .* needs channels=3"):
        build("googlenet", 7, channels=1, transform_input=True)


def test_small_resnet_keeps_the_resolution():
    network = small_resnet("resnet18", 7)
    stem = nn.Sequential(network.conv1, network.bn1, network.relu, network.maxpool, network.layer1)
    assert stem(torch.randn(2, 3, 32, 32)).shape == (2, 64, 32, 32)


# Heads


@both_heads
@networks
def test_heads(name, head):
    network = build(name, 7, head=head)
    kind = nn.Linear if head == "linear" else CosineClassifier
    heads = [module for module in network.modules() if isinstance(module, kind)]
    assert heads[-1].out_features == 7
    if head == "cosine":
        assert heads[-1].scale == 1.0
        assert scores_of(network, torch.randn(2, 3, 32, 32)).abs().amax() <= 1.0


def test_scale_of_the_cosine_head():
    network = build("convnet", 7, head="cosine", scale=20.0)
    assert network.classifier.scale == 20.0


def test_the_last_linear_layer_may_be_as_wide_as_others():
    network = nn.Sequential(nn.Linear(4, 7), nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 8)))
    assert find_head(network, 7)[0] == "1.0"
    with torch.device("meta"):
        assert isinstance(build("vit_b_16", 768, head="cosine").heads.head, CosineClassifier)


@pytest.mark.parametrize("bias", [True, False])
def test_a_new_linear_layer_has_a_bias_if_the_old_one_had(bias):
    network = nn.Sequential(nn.Linear(4, 9, bias=bias))
    replace_head(network, outputs=9, classes=7, scale=None)
    assert (network[0].bias is not None) == bias
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_no_linear_layer():
    assert scores_of(build("squeezenet1_1", 7), torch.randn(2, 3, 64, 64)).shape == (2, 7)
    with pytest.raises(ValueError, match="SqueezeNet has no linear layer with 7 outputs"):
        build("squeezenet1_1", 7, head="cosine")


# Training


@cases
def test_gradients_reach_every_parameter(name, channels, head):
    network = build(name, 7, channels=channels, head=head)
    scores = network(torch.randn(4, channels, 24, 24))
    F.cross_entropy(scores, torch.arange(4)).backward()
    without = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@both_heads
@pytest.mark.parametrize("name", ["convnet", "densenet40-12"])
def test_half_precision(name, head):
    network = build(name, 7, head=head)
    with torch.autocast("cpu", torch.bfloat16):
        scores = network(torch.randn(4, 3, 32, 32))
    assert scores.dtype == (torch.float32 if head == "cosine" else torch.bfloat16)
    scores.float().logsumexp(1).sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


def test_the_convnet_learns():
    """Twenty smooth patterns in noise, from 40 batches."""
    network = build("convnet", 20, channels=1)
    patterns = F.interpolate(torch.randn(20, 1, 6, 6), size=32, mode="bilinear")

    def batch() -> tuple[Tensor, Tensor]:
        labels = torch.randint(20, (64,))
        return patterns[labels] + 0.5 * torch.randn(64, 1, 32, 32), labels

    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for _ in range(40):
        images, labels = batch()
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        optimizer.step()
    images, labels = batch()
    assert (scores_of(network, images).argmax(1) == labels).float().mean() > 0.9


def test_dropout_is_after_every_convolution_but_the_first():
    parts = list(build("densenet40-12", 7, dropout=0.2).features.modules())
    assert sum(isinstance(part, nn.Conv2d) for part in parts) == 39
    assert sum(isinstance(part, nn.Dropout) and part.p == 0.2 for part in parts) == 38


# Names and arguments


def test_available_has_a_line_about_each():
    lines = available()
    assert {*OWN, *LARGE, *OTHERS} <= set(lines)
    assert all(line and "\n" not in line for line in lines.values())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet19", "resnet18"),
        ("ResNet-50-small", "resnet50-small"),
        ("densenet-40-12", "densenet40-12"),
        ("conv-net", "convnet"),
        ("VGG11", "vgg11"),
    ],
)
def test_unknown_names(name, near):
    with pytest.raises(ValueError, match="there is no network") as raised:
        build(name, 7)
    assert f"{name!r}. Did you mean {near!r}?" in str(raised.value)
    assert ", ".join(available()) in str(raised.value)


def test_a_name_that_is_near_to_none():
    with pytest.raises(ValueError, match=r"no network '§'\. There are: convnet, "):
        build("§", 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 0}, "classes must be at least 1"),
        ({"channels": 2}, r"channels must be 1 \(grey\) or 3 \(colour\), got channels=2"),
        ({"head": "cos"}, "head must be one of linear, cosine, got 'cos'"),
        ({"image_size": 0}, "image_size must be at least 1"),
        ({"scale": 2.0}, "scale=2.0 is that of the cosine head"),
        ({"head": "cosine", "scale": 0.0}, "scale must be positive"),
        ({"pretrained": True}, "convnet has no pretrained weights"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("convnet", **{"classes": 7, **arguments})


@pytest.mark.parametrize(
    ("depth", "bottleneck", "multiple"), [(41, False, 3), (4, False, 3), (43, True, 6)]
)
def test_wrong_depths(depth, bottleneck, multiple):
    with pytest.raises(ValueError, match=f"a multiple of {multiple}, got depth={depth}"):
        DenseNet(depth, 12, 10, bottleneck=bottleneck)


@pytest.mark.parametrize("option", ["depth", "colour"])
@pytest.mark.parametrize("name", ["densenet40-12", "resnet18"])
def test_options_that_a_network_does_not_have(name, option):
    with pytest.raises(TypeError, match=option):
        build(name, 7, **{option: 5})
