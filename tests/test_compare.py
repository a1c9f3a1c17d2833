"""The measuring: which prompts and drafters, in which order, counted how, and what is said of a difference."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from selfdraft import compare
from selfdraft.checkpoint import load_drafter
from selfdraft.compare import PLAIN, REFERENCE, Answer, Prompt, Settings
from tests.models import prompts as random_prompts
from tests.models import tiny
from tests.scripted import noisy

SETTINGS = Settings(
    model="tiny",
    prompts=Path("prompts.jsonl"),
    limit=None,
    drafters=None,
    temperature=0.0,
    seed=5,
    max_new_tokens=12,
    dtype="float32",
    repeats=1,
)
IDS = [random_prompts((length,), seed=length)["input_ids"] for length in (4, 7, 9)]


def write_rows(path: Path, *rows: dict) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


# --- Prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_the_text_or_the_first_turn(tmp_path):
    file = write_rows(tmp_path / "p.jsonl", {"prompt": "a", "task": "x"}, {"turns": ["b", "c"], "id": 7})
    assert compare.read_prompts(file) == [Prompt("a", "x"), Prompt("b", None)]


def test_a_limit_is_spread_over_the_tasks_and_within_them(tmp_path):
    rows = [
        {"prompt": f"{task}{i}", "task": task} for task, count in (("x", 8), ("y", 1), ("z", 6)) for i in range(count)
    ]
    file = write_rows(tmp_path / "p.jsonl", *rows)
    chosen = [prompt.text for prompt in compare.read_prompts(file, limit=7)]
    assert chosen == ["x0", "x2", "x5", "y0", "z0", "z2", "z4"]
    assert len(compare.read_prompts(file, limit=100)) == 15
    assert len(compare.read_prompts(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"text": "b"}', "line 2 has neither `prompt` nor `turns`"),
        ('{"prompt": "a"}\n{"prompt": "  "}', "line 2 has an empty prompt"),
        ('{"turns": []}', "line 1 has an empty prompt"),
        ('{"prompt": "a"\n', "line 1 is not JSON"),
        ("[1]", "line 1 has neither"),
        ("\n\n", "holds no prompts"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, text, message):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        compare.read_prompts(file)


def test_a_missing_prompt_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no prompt file .*none.jsonl"):
        compare.read_prompts(tmp_path / "none.jsonl")


def test_the_shipped_prompts_can_be_read():
    assert len(compare.read_prompts(compare.SHIPPED_PROMPTS)) > 4


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["[unk]", "<user>", "<bot>", "good", "day"])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="[unk]"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="[unk]")
    made.chat_template = template
    return made


def test_a_prompt_is_a_user_turn_where_there_is_a_chat_template():
    template = (
        "{% for m in messages %}<user> {{ m.content }}{% endfor %}{% if add_generation_prompt %} <bot>{% endif %}"
    )
    prompts = [Prompt("good day")]
    (plain,) = compare.encode(tokenizer(None), prompts, tiny("llama"), 8)
    (chat,) = compare.encode(tokenizer(template), prompts, tiny("llama"), 8)
    assert plain.tolist() == [[3, 4]]
    assert chat.tolist() == [[1, 3, 4, 2]]


def test_a_prompt_that_does_not_fit_into_the_model_is_refused():
    with pytest.raises(ValueError, match="prompt 1 has 6 tokens, and with 507 new ones .* 512 positions"):
        compare.encode(tokenizer(None), [Prompt("day"), Prompt("day " * 6)], tiny("llama"), 507)


# --- Drafters ---------------------------------------------------------------------------------------------------------


def sources(*names: str, model: str = "tiny", notes: list[str] | None = None) -> dict[str, str]:
    wanted = dataclasses.replace(SETTINGS, drafters=names or None, model=model)
    return compare.drafter_sources(wanted, (notes if notes is not None else []).append)


def drafter_folder(path: Path) -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return str(path)


def test_a_folder_is_named_by_as_much_of_its_path_as_is_needed(tmp_path):
    one, other = (drafter_folder(tmp_path / name / "drafter") for name in ("one", "other"))
    assert sources(one) == {"drafter": one}
    assert sources(one, "ngram", other, one) == {"one/drafter": one, "ngram": "ngram", "other/drafter": other}


def test_a_folder_never_takes_the_name_of_another_arm(tmp_path):
    folder = drafter_folder(tmp_path / "runs" / "plain")
    assert sources(folder) == {"runs/plain": folder}


def test_a_misspelt_drafter_is_answered_with_the_nearest_name(tmp_path):
    with pytest.raises(ValueError, match='no drafter "n-gram".*did you mean "ngram"'):
        sources("n-gram")
    right = drafter_folder(tmp_path / "medusa_run")
    with pytest.raises(ValueError, match=f'did you mean "{right}"'):
        sources(str(tmp_path / "medusa_rum"))


def test_a_folder_without_a_drafter_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        sources(str(tmp_path))


def test_a_hub_id_is_left_to_the_loader():
    assert sources("someone/heads") == {"heads": "someone/heads"}


def test_default_arms_are_the_shipped_ones_for_the_default_model_only(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "ASSETS", tmp_path)
    shipped = drafter_folder(tmp_path / "smollm2-135m" / "medusa")
    notes: list[str] = []
    assert sources(model="smollm2-135m", notes=notes) == {"ngram": "ngram", "medusa": shipped}
    assert [note.split(":")[0] for note in notes] == ["draft_model", "eagle3"]
    assert sources("medusa") == {"medusa": shipped}
    assert sources(model="another") == {"ngram": "ngram"}


# --- Measuring --------------------------------------------------------------------------------------------------------


def answers_of(model, drafters=None, **changes) -> list[Answer]:
    return list(compare.measure(model, drafters or {}, IDS, dataclasses.replace(SETTINGS, **changes)))


def test_arms_take_turns_on_every_prompt_and_the_first_place_rotates():
    model = tiny("llama")
    answers = answers_of(model, {"ngram": load_drafter("ngram", model)}, repeats=2, max_new_tokens=2)
    arms = (REFERENCE, PLAIN, "ngram")
    order = [(answer.prompt, answer.arm) for answer in answers]
    rounds = [(prompt, prompt + repeat) for repeat in range(2) for prompt in range(len(IDS))]
    assert order == [(prompt, arms[(first + i) % 3]) for prompt, first in rounds for i in range(3)]


def test_warm_up_answers_are_neither_counted_nor_timed(monkeypatch):
    """Every arm is called once more than it has answers."""
    calls = []

    def decoders(model, drafters, temperature):
        return {arm: lambda ids, seed, count: (calls.append(count), (ids, None))[1] for arm in (REFERENCE, PLAIN)}

    monkeypatch.setattr(compare, "decoders", decoders)
    answers = answers_of(tiny("llama"), max_new_tokens=50)
    assert len(answers) == 2 * len(IDS)
    assert calls == [compare.WARM_UP_TOKENS] * 2 + [50] * 2 * len(IDS)


def test_all_arms_count_the_tokens_up_to_the_end_of_the_text(monkeypatch):
    """The third token of the first answer is declared the end of texts."""
    model = tiny("llama")
    end = next(answer for answer in answers_of(model) if answer.prompt == 0).tokens[2]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [end, 127])
    answers = answers_of(model, {"noisy": noisy(model, 0.05)})
    lengths = {answer.arm: len(answer.tokens) for answer in answers if answer.prompt == 0}
    assert lengths == {REFERENCE: 3, PLAIN: 3, "noisy": 3}
    assert all(answer.tokens[-1] == end for answer in answers if answer.prompt == 0)
    assert all(answer.stats.new_tokens == len(answer.tokens) for answer in answers if answer.stats)


def test_an_arm_that_runs_past_the_end_of_the_text_gains_nothing(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(model.generation_config, "eos_token_id", 9)
    tail = torch.tensor([[5, 9, 7, 9]])
    arms = {arm: lambda ids, seed, count: (torch.cat([ids, tail], dim=1), None) for arm in (REFERENCE, PLAIN)}
    monkeypatch.setattr(compare, "decoders", lambda *_: arms)
    assert {answer.tokens for answer in answers_of(model)} == {(5, 9)}


def test_greedy_arms_give_the_same_tokens():
    model = tiny("llama")
    answers = answers_of(model, {"noisy": noisy(model, 0.05)})
    assert compare.divergences(answers, REFERENCE, IDS, model, SETTINGS) == {PLAIN: [], "noisy": []}
    assert all(len(answer.tokens) == SETTINGS.max_new_tokens and answer.seconds > 0 for answer in answers)


def test_sampled_arms_give_the_same_tokens_and_prompts_have_their_own_seeds():
    model = tiny("llama")
    settings = dataclasses.replace(SETTINGS, temperature=0.8)
    answers = answers_of(model, {"noisy": noisy(model, 0.05)}, temperature=0.8)
    assert compare.divergences(answers, PLAIN, IDS, model, settings) == {"noisy": []}
    greedy = {answer.prompt: answer.tokens for answer in answers_of(model) if answer.arm == PLAIN}
    assert all(answer.tokens != greedy[answer.prompt] for answer in answers)
    # prompt 1 runs with seed 5 + 1
    alone = list(compare.measure(model, {}, IDS[1:2], dataclasses.replace(settings, seed=6)))
    assert {answer.tokens for answer in alone if answer.arm == PLAIN} == {
        answer.tokens for answer in answers if answer.arm == PLAIN and answer.prompt == 1
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["do_sample", "top_k", "top_p", "temperature", "repetition_penalty"])
def test_only_the_temperature_of_the_settings_shapes_the_answers(monkeypatch, name, temperature):
    """A model whose own generation config asks for something else answers as if it did not."""
    model = tiny("llama")
    odd = {"do_sample": temperature == 0, "top_k": 2, "top_p": 0.1, "temperature": 3.0, "repetition_penalty": 1.7}
    expected = [answer.tokens for answer in answers_of(model, temperature=temperature)]
    monkeypatch.setattr(model.generation_config, name, odd[name])
    assert [answer.tokens for answer in answers_of(model, temperature=temperature)] == expected


# --- Differences ------------------------------------------------------------------------------------------------------


def test_the_first_difference_of_two_answers():
    assert compare.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert compare.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert compare.first_difference([1, 2], [1, 2, 3]) == 2
    assert compare.first_difference([], []) is None


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_targets_scores_are_what_its_tokens_are_the_argmax_of(temperature):
    model = tiny("llama")
    for answer in answers_of(model, temperature=temperature):
        if answer.arm == PLAIN:
            for place, token in enumerate(answer.tokens):
                prefix = torch.cat([IDS[answer.prompt], torch.tensor([answer.tokens[:place]], dtype=torch.long)], dim=1)
                scores = compare.target_scores(model, prefix, temperature, SETTINGS.seed + answer.prompt)
                assert scores.argmax() == token


def changed(tokens: tuple[int, ...], place: int, token: int) -> tuple[int, ...]:
    return (*tokens[:place], token, *tokens[place + 1 :])


def test_a_wrong_token_is_no_near_tie_and_a_rival_within_rounding_is():
    """Two answers differ from transformers' at token 4: one by the runner-up, one by the least likely token."""
    model = tiny("llama")
    right = next(answer for answer in answers_of(model) if answer.arm == REFERENCE and answer.prompt == 0)
    prefix = torch.cat([IDS[0], torch.tensor([right.tokens[:4]])], dim=1)
    scores = compare.target_scores(model, prefix, 0.0, 0)
    best, second = scores.topk(2).values.tolist()
    runner_up, last = scores.topk(2).indices[1].item(), scores.argmin().item()
    answers = [
        right,
        Answer("close", 0, changed(right.tokens, 4, runner_up), 1.0),
        Answer("wrong", 0, changed(right.tokens, 4, last), 1.0),
        Answer("short", 0, right.tokens[:4], 1.0),
    ]
    # The dtype whose rounding can hide the gap of the two best here, or float32, whose rounding cannot.
    assert best - second > compare.NEAR_TIE_UNITS * torch.finfo(torch.float32).eps * abs(best)
    in_float32 = compare.divergences(answers, REFERENCE, IDS, model, SETTINGS)
    assert not any(found[0].is_near_tie for found in in_float32.values())
    for arm, token in (("close", runner_up), ("wrong", last), ("short", None)):
        (found,) = in_float32[arm]
        assert (found.prompt, found.position, found.token, found.reference_token) == (0, 4, token, right.tokens[4])
        assert found.top2_gap == pytest.approx(best - second, abs=1e-4)


def test_rounding_of_the_dtype_decides_what_a_near_tie_is(monkeypatch):
    """Scores 8.0, 7.9 and 1.0: bf16 may confuse the first two, float32 may not, and nothing may give the third."""
    monkeypatch.setattr(compare, "target_scores", lambda *_: torch.tensor([1.0, 8.0, 7.9]))
    answers = [Answer(REFERENCE, 0, (1,), 1.0), Answer("close", 0, (2,), 1.0), Answer("wrong", 0, (0,), 1.0)]

    def ties(dtype: str) -> dict[str, bool]:
        settings = dataclasses.replace(SETTINGS, dtype=dtype)
        found = compare.divergences(answers, REFERENCE, IDS, tiny("llama"), settings)
        return {arm: each[0].is_near_tie for arm, each in found.items()}

    assert ties("bfloat16") == {"close": True, "wrong": False}
    assert ties("float32") == {"close": False, "wrong": False}


def test_a_prompt_counts_once_however_often_it_was_repeated(monkeypatch):
    monkeypatch.setattr(compare, "target_scores", lambda *_: torch.tensor([1.0, 8.0, 7.9]))
    answers = [Answer(REFERENCE, 0, (1,), 1.0), Answer("close", 0, (2,), 1.0), Answer("close", 0, (2,), 1.0)]
    assert len(compare.divergences(answers, REFERENCE, IDS, tiny("llama"), SETTINGS)["close"]) == 1
