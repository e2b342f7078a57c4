"""Recipes: from YAML and back, with errors that say what is wrong; the losses that they name."""

from dataclasses import asdict

import pytest
import torch

import topklass
from topklass.functional import topk_cross_entropy
from topklass.train.criterion import LOSSES, build_loss
from topklass.train.recipe import Recipe, load_recipe
from topklass.train.signature import Signature, build_network

LABEL = torch.tensor([0])
COUNTS = torch.tensor([50, 20, 5, 1, 1, 1, 1])


def test_saved_and_loaded(tmp_path):
    recipe = Recipe(loss="noised", epsilon=0.3, samples=0, milestones=(0.3, 0.6), subset=100)
    recipe.save(tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_numbers_of_yaml(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"learning_rate: 1e-2\nepochs: 3\nweight_decay: 0\nseed: {2**60 + 1}\n")
    recipe = load_recipe(path)
    assert recipe.learning_rate == 0.01
    assert isinstance(recipe.weight_decay, float)
    assert recipe.epochs == 3
    assert recipe.seed == 2**60 + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: many", "epochs must be an integer, got 'many'"),
        ("epochs: 2.5", "epochs must be an integer"),
        ("epohcs: 3", "Did you mean 'epochs'"),
        ("loss: smoth", "Did you mean 'smooth'"),
        ("schedule: linear", "schedule must be one of"),
        ("noise: 2", "noise must be from 0 to 1, got 2"),
        ("cutmix: -0.5", "cutmix must be from 0 to 1"),
        ("learning_rate: 0", "learning_rate must be positive, got 0"),
        ("momentum: 1", "momentum must be less than 1, got 1"),
        ("weight_decay: -1", "weight_decay must be at least 0, got -1"),
        ("patience: 0", "patience must be at least 1, got 0"),
        ("k: 0", "k must be at least 1"),
        ("gamma: 2", "'short-list' has no gamma; it takes first_guess"),
        ("{loss: noised, first_guess: 0.5}", "'noised' has no first_guess"),
        ("match: 1", "match must be true or false"),
        ("data: 3", "data must be a word"),
        ("k:", "k must be an integer, got None"),
        ("epochs: .inf", "epochs must be an integer, got inf"),
        ("milestones: 0.5", "milestones must be a list of numbers, got 0.5"),
        ("milestones: [soon]", "milestones must be a list of numbers"),
        ("noise: .nan", "noise must be from 0 to 1, got nan"),
        ("epochs: true", "epochs must be an integer, got True"),
        ("noise: true", "noise must be a number, got True"),
        ("workers: -1", "workers must be at least 0, got -1"),
        ("resize: 100", "resize must be at least crop=224, got 100"),
        ("data_options: 5", "data_options must be options as `name: value`, got 5"),
        ("- a\n- b", "must hold settings"),
        ("a: [", "recipe.yaml is not a valid recipe: ParserError"),
        ("", "must hold settings as `name: value`, got None"),
        ("# nothing\n{}", "must hold settings as `name: value`, got {}"),
        ("seed: 2020-13-45", "recipe.yaml is not a valid recipe: month must be in 1..12"),
        ("[" * 10_000, "recipe.yaml is not a valid recipe: RecursionError"),
    ],
)
def test_errors(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_recipe(path)


def test_no_recipe(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no recipe"):
        load_recipe(tmp_path / "none.yaml")


def test_changes():
    recipe = Recipe(loss="smooth").with_changes({"epochs": 2, "tau": "0.5"})
    assert recipe.epochs == 2
    assert recipe.loss_options() == {"tau": 0.5}
    assert asdict(Recipe())["epochs"] != 2


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_built_and_trains(name):
    criterion = build_loss(name, 2, COUNTS, {})
    logits = torch.randn(4, 7, requires_grad=True)
    criterion(logits, torch.tensor([0, 1, 2, 3])).backward()
    assert logits.grad.abs().sum() > 0


def test_options_reach_the_loss():
    loss = build_loss("noised", 3, COUNTS, {"epsilon": 0.7, "samples": None})
    assert (loss.k, loss.epsilon, loss.samples) == (3, 0.7, None)
    with pytest.raises(ValueError, match="has no option tau"):
        build_loss("noised", 3, COUNTS, {"tau": 1.0})


@pytest.mark.parametrize(
    ("k", "share", "lengths"),
    [(3, 0.3, {1: 0.3, 3: 0.7}), (3, 0.0, {1: 0.0, 3: 1.0}), (1, 0.3, 1)],
    ids=str,
)
def test_the_first_guess(k, share, lengths):
    options = Recipe(loss="topk-cross-entropy", first_guess=share).loss_options()
    criterion = build_loss("topk-cross-entropy", k, COUNTS, options)
    assert criterion.k == lengths
    logits, labels = torch.randn(4, 7), torch.arange(4)
    assert torch.equal(criterion(logits, labels), topk_cross_entropy(logits, labels, lengths))


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_shares_of_the_first_guess(share):
    with pytest.raises(ValueError, match=f"at least 0 and less than 1, got {share:g}"):
        build_loss("topk-cross-entropy", 3, COUNTS, {"first_guess": share})


def test_margins_by_count():
    margins = build_loss("ldam", 3, COUNTS, {}).margin
    torch.testing.assert_close(margins, topklass.class_margins(COUNTS))
    margins = build_loss("noised-imbalanced", 3, COUNTS, {"margin": 0.4}).margin
    torch.testing.assert_close(margins, topklass.class_margins(COUNTS, 0.4))


@pytest.mark.parametrize("tau", [0.1, 1.0, 3.0])
def test_the_smooth_loss_is_matched(tau):
    """It is multiplied by k; at temperature 1 it sees k·τ·logits and is divided by τ."""
    logits, labels = torch.randn(4, 9, dtype=torch.float64), torch.arange(4)
    options = {"tau": tau, "margin": 0.5}
    paper = build_loss("smooth", 3, torch.ones(9), options, match=False)
    matched = build_loss("smooth", 3, torch.ones(9), options)
    torch.testing.assert_close(
        matched(logits, labels), 3 * paper(logits, labels), rtol=1e-12, atol=0
    )
    cold = build_loss("smooth", 3, torch.ones(9), {**options, "temperature": 1.0})
    scaled = paper(3 * tau * logits, labels) / tau
    torch.testing.assert_close(cold(logits, labels), scaled, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["smooth", "topk-cross-entropy", "short-list", "cross-entropy"])
def test_slope_and_curvature_of_cross_entropy(name):
    """At equal scores: −1 + 1/C and (1 − 1/C)/C for the label, up to the length of the list."""
    logits = torch.zeros(1, 1000, dtype=torch.float64)
    at_one = {"temperature": 1.0}
    loss = build_loss(name, 5, torch.ones(1000), at_one, label_smoothing=0.0)

    def of_label(score):
        return loss(logits.index_put((torch.tensor([0]), torch.tensor([0])), score), LABEL)

    at = torch.zeros((), dtype=torch.float64)
    slope = torch.func.grad(of_label)(at)
    curvature = torch.func.grad(torch.func.grad(of_label))(at)
    assert -1.0 <= slope < -0.99
    assert 0.3 / 1000 < curvature < 6 / 1000


@pytest.mark.parametrize("name", LOSSES)
def test_label_smoothing_of_every_loss(name):
    logits, labels = torch.randn(4, 7), torch.arange(4)
    spread, sharp = (
        build_loss(
            name,
            3,
            COUNTS,
            {**({"samples": None} if "noised" in name else {})},
            label_smoothing=each,
        )
        for each in (0.3, 0.0)
    )
    uniform = torch.full((4, 7), 1 / 7)
    mixed = 0.7 * sharp(logits, labels) + 0.3 * sharp(logits, uniform)
    torch.testing.assert_close(spread(logits, labels), mixed, rtol=1e-4, atol=1e-5)


def test_what_changes_any_loss():
    """Adjusted logits around classes that are weighted after a share of the training."""
    recipe = Recipe(loss="smooth", reweight_from=0.75, logit_adjustment=2.0, epochs=8)
    adjusted = recipe.criterion(COUNTS)
    assert isinstance(adjusted, topklass.LogitAdjustment)
    assert isinstance(adjusted.criterion, topklass.DeferredReweighting)
    assert adjusted.criterion.start == 6
    assert isinstance(Recipe().criterion(COUNTS), topklass.ShortListLoss)


def test_options_that_suit_the_head():
    """Those of Garcin et al. for cosines, unless others are given; logits are not scaled."""
    noised = Recipe(loss="noised-imbalanced", head="cosine")
    assert noised.loss_options() == {"epsilon": 0.01, "scale": 60.0}
    assert noised.with_changes({"scale": 30}).loss_options()["scale"] == 30
    assert Recipe(loss="noised", head="cosine").loss_options()["margin"] == 0.2
    assert Recipe(loss="noised").loss_options() == {}
    assert Recipe(loss="ldam").loss_options() == {"scale": 1.0}
    assert Recipe(loss="ldam", head="cosine").loss_options() == {}


@pytest.mark.parametrize(("loss", "scale"), [("smooth", 16.0), ("noised", 1.0), ("ldam", 1.0)])
def test_a_cosine_head_scales_for_losses_that_do_not(loss, scale):
    signature = Signature(tuple("abcdefg"), 1, 8, 8, None, (0.0,), (1.0,))
    network = build_network(Recipe(loss=loss, head="cosine"), signature)
    (head,) = (m for m in network.modules() if isinstance(m, topklass.CosineClassifier))
    assert float(head.scale) == scale


def test_a_recipe_that_was_cut_off(tmp_path):
    """At any line: without its last ones it would have their defaults."""
    path = tmp_path / "recipe.yaml"
    Recipe(workers=3, strategy="ddp").save(path)
    assert load_recipe(path) == Recipe(workers=3, strategy="ddp")
    lines = path.read_text().splitlines()
    for number in range(1, len(lines)):
        path.write_text("\n".join(lines[:number]) + "\n")
        with pytest.raises(ValueError, match=r"recipe\.yaml .*(its end is missing|not YAML)"):
            load_recipe(path)
    path.write_text("\n".join(lines[1:-1]))  # as people write them
    assert load_recipe(path).workers == 3
