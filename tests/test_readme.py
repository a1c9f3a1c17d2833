"""What the README shows works as it stands there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_python_example_runs(monkeypatch, smollm2):
    monkeypatch.chdir(ROOT)
    example = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)  # noqa: S102
    assert names["out"].stats.tokens_per_round > 1.5
    plain = names["selfdraft"].generate(names["model"], **names["inputs"], **names["options"])
    same = (names["drafted"][0, : plain.shape[1]] == plain[0]).float().mean()
    assert same > 0.5, "bf16 may leave plain decoding at a near-tie, but not at once"


def test_the_tree_of_files_names_what_is_there():
    tree = re.search(r"## The tree of files\n\n```\n(.*?)```", README, re.DOTALL).group(1)
    folder = Path()
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split()
        if not line.startswith(" "):
            folder = Path(names[0]) if names[0].endswith("/") else Path()
            paths = [Path(name) for name in names]
        else:
            paths = [folder / name for name in names]
        for path in paths:
            assert (ROOT / path).exists(), f"README names {path}"


def test_every_config_and_script_it_names_exists():
    for name in re.findall(r"(?:configs|scripts)/[\w.]+", README):
        assert (ROOT / name).exists(), f"README names {name}"
