"""Weights that others trained: downloaded only on request, and read without running them."""

import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torchvision

from topklass.models import build

FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"

both_heads = pytest.mark.parametrize("head", ["linear", "cosine"])
both_channels = pytest.mark.parametrize("channels", [1, 3])


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """An empty folder of downloaded weights, and no way to download any."""

    def refuse(url: str, *_: object, **__: object) -> None:
        raise ConnectionError(f"tried to download {url}")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.delenv(FORCED, raising=False)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def downloaded(name: str) -> str:
    """The name of the file that torchvision looks for."""
    return Path(torchvision.models.get_model_weights(name).DEFAULT.url).name


@pytest.mark.parametrize("name", ["convnet", "densenet40-12", "resnet18-small", "resnet18"])
def test_nothing_is_downloaded(name, hub):
    build(name, 7)


def test_pretrained_downloads(hub):
    """Without a network, the error says which weights, why, and where to put them."""
    with pytest.raises(OSError, match="tried to download https://") as caught:
        build("shufflenet_v2_x0_5", 7, pretrained=True)
    message = str(caught.value)
    assert message.startswith("ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1 could not be downloaded")
    assert f"{downloaded('shufflenet_v2_x0_5')} in {hub}, or take pretrained=False" in message
    assert FORCED not in os.environ


@both_channels
@both_heads
@pytest.mark.parametrize("classes", [7, 1000])
def test_pretrained_weights(classes, head, channels, hub):
    name = "shufflenet_v2_x0_5"
    stored = torchvision.models.get_model(name).state_dict()
    torch.save(stored, hub / downloaded(name))
    network = build(name, classes, channels=channels, head=head, pretrained=True)
    loaded = network.state_dict()
    assert network.fc.out_features == classes
    if classes == 1000 and head == "linear":
        assert torch.equal(loaded["fc.weight"], stored["fc.weight"])
    for key in stored:
        if key == "conv1.0.weight" and channels == 1:
            assert torch.equal(loaded[key], stored[key].sum(1, keepdim=True))
        elif not key.startswith("fc."):
            assert torch.equal(loaded[key], stored[key])


class Harmful:
    """What a pickle may do when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_weights_are_read_without_running_them(hub):
    trace = hub / "trace"
    torch.save({"fc.weight": Harmful(trace)}, hub / downloaded("resnet18"))
    with pytest.raises(pickle.UnpicklingError):
        build("resnet18", 7, pretrained=True)
    assert not trace.exists()
    assert FORCED not in os.environ
    torch.load(hub / downloaded("resnet18"), weights_only=False)
    assert trace.exists()


# timm


def test_timm_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="timm/resnet18 needs timm: pip install 'timm'"):
        build("timm/resnet18", 7)


@both_heads
@both_channels
def test_timm(channels, head):
    pytest.importorskip("timm")
    network = build("timm/test_vit", 7, channels=channels, image_size=32, head=head)
    assert network(torch.randn(2, channels, 32, 32)).shape == (2, 7)


def test_timm_without_a_network(monkeypatch):
    timm = pytest.importorskip("timm")

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError("no connection")

    monkeypatch.setattr(timm, "create_model", refuse)
    with pytest.raises(OSError, match=r"timm/test_vit could not be downloaded \(no connection\);"):
        build("timm/test_vit", 7, pretrained=True)


@pytest.mark.parametrize("name", ["resnet19", "hf-hub:timm/resnet18"])
def test_unknown_names_of_timm(name):
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=f"timm .* has no network {name!r}"):
        build(f"timm/{name}", 7)
