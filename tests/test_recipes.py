"""Every recipe loads, every drafter that trains has one and a tiny twin, and a wrong key is met with the right one."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "train"))
import recipe as recipes  # noqa: E402

RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def parse(name: str, *more: str):
    return recipes.parse_recipe(["--config", f"configs/{name}.yaml", *more])


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_loads(name):
    recipe, model = parse(name)
    assert isinstance(model, recipes.drafter_class(recipe.drafter).config_class)
    assert recipe.output_dir == f"runs/{name}"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_holds_only_what_differs_from_the_defaults(name):
    recipe, model = parse(name)
    ours = dict(recipes.leaves(asdict(recipe) | {"model": asdict(model)}))
    reference = dict(recipes.leaves(asdict(recipes.Recipe(drafter="")) | {"model": asdict(type(model)())}))
    given = set(recipes.given_values(["--config", f"configs/{name}.yaml"])) - {"config"}
    # A dictionary is replaced as a whole, so below model.model all fields are given.
    assert not [key for key in given if not key.startswith("model.model.") and ours[key] == reference[key]]


def test_every_drafter_that_trains_has_a_recipe_and_a_tiny_twin():
    kinds = {name: parse(name)[0].drafter for name in RECIPES}
    for prefix in ("tiny_", ""):
        assert {kind for name, kind in kinds.items() if name.startswith(prefix)} == set(recipes.trainable_kinds())
    for name in RECIPES:
        if not name.startswith("tiny_"):
            assert kinds[f"tiny_{name.split('_')[0]}"] == kinds[name]


def test_the_command_line_wins_over_the_file_whatever_the_order():
    assert parse("tiny_eagle3", "--optim.lr", "1e-2")[0].optim.lr == 0.01
    assert parse("tiny_eagle3", "--optim.lr=1e-2", "--model.unroll=2")[1].unroll == 2
    assert parse("tiny_eagle3", "--data.train", "a.jsonl")[0].data.train == "a.jsonl"
    for file in (["--config", "configs/tiny_eagle3.yaml"], ["--config=configs/tiny_eagle3.yaml"]):
        assert recipes.parse_recipe(["--output_dir", "elsewhere", *file, "--seed=3"])[0].output_dir == "elsewhere"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("optim.lrr", "optim.lr"),
        ("lr", "optim.lr"),
        ("epoch", "epochs"),
        ("model.unrolls", "model.unroll"),
        ("model.draft_vocabulary_size", "model.draft_vocab_size"),
        ("data.validaton", "data.validation"),
    ],
)
def test_a_wrong_key_names_the_nearest_right_one(tmp_path, wrong, right):
    with pytest.raises(ValueError, match=f"unknown key '{wrong}' on the command line; did you mean '{right}'"):
        parse("tiny_eagle3", f"--{wrong}", "1")
    file = tmp_path / "wrong.yaml"
    *groups, last = wrong.split(".")
    body = f"{groups[0]}: {{{last}: 1}}" if groups else f"{last}: 1"
    file.write_text(f"drafter: eagle\n{body}\n")
    with pytest.raises(ValueError, match=f"unknown key '{wrong}' in .*wrong.yaml; did you mean '{right}'"):
        recipes.parse_recipe(["--config", str(file)])


def test_a_wrong_key_lists_its_neighbours_when_nothing_is_near():
    with pytest.raises(ValueError, match="known under optim: optim.lr, optim.matrix_lr"):
        parse("tiny_eagle3", "--optim.learning_rate", "1")


def test_a_value_of_the_wrong_type_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse("tiny_eagle3", "--optim.lr", "fast")
    assert "optim.lr" in capsys.readouterr().err


def test_an_unknown_drafter_and_a_missing_recipe_are_named():
    with pytest.raises(ValueError, match="drafter is 'eagel'; .*did you mean 'eagle'"):
        parse("tiny_eagle3", "--drafter", "eagel")
    with pytest.raises(ValueError, match="there is no recipe 'configs/nothing.yaml'"):
        parse("nothing")


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit):
        parse("tiny_eagle3", "--help")
    text = " ".join(capsys.readouterr().out.split())
    for key in (
        *recipes.keys_of(recipes.Recipe),
        *(f"model.{key}" for key in recipes.keys_of(parse("tiny_eagle3")[1])),
    ):
        assert f"--{key}" in text
    assert "Peak learning rate of Muon" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.step_tokens", 0),
        ("data.forward_tokens", 0),
        ("data.max_length", -3),
        ("eval.every", 0),
        ("eval.prompts", 0),
        ("eval.max_new_tokens", 1),
        ("epochs", 0),
        ("max_steps", -1),
        ("save_every", 0),
        ("threads", -2),
        ("optim.clip", 0),
        ("optim.clip", -1),
        ("optim.warmup_ratio", 3),
    ],
)
def test_a_number_with_which_nothing_would_be_learnt_or_measured_is_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} is {value}"):
        parse("tiny_eagle3", f"--{key}", str(value))
