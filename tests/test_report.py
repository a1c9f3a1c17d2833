"""The figures of a comparison, against answers whose figures are known by hand, and what is printed of them."""

import io
import json

import pytest
from rich.console import Console

from selfdraft import report
from selfdraft.compare import PLAIN, REFERENCE, Answer, Divergence, Prompt
from selfdraft.drafters.ngram import Ngram
from selfdraft.metrics import Stats
from selfdraft.planner import Plan
from selfdraft.theory import expected_tokens_per_round

PROMPTS = [Prompt("a", "x"), Prompt("b", "x"), Prompt("c", "y")]
CHAIN = Ngram(plan=Plan(depth=2))
TREE = Ngram(plan=Plan(depth=2, width=2))


def stats(rounds: int, drafted: list[int], accepted: list[int], draft: float, verify: float, total: float) -> Stats:
    new_tokens = 1 + rounds + sum(accepted)
    return Stats(new_tokens, 1, rounds, drafted, accepted, 0.5, draft, verify, total)


def answer(arm: str, prompt: int, tokens: int, seconds: float, counts: Stats | None = None, peak: int | None = None):
    return Answer(arm, prompt, tuple(range(tokens)), seconds, counts, peak)


def example() -> list[Answer]:
    """transformers: 10 tokens/s. plain: 8 tokens/s. drafter: 20, 30 and 5 tokens/s: 2x, 3x and 0.5x, in median 2x."""
    plain = stats(rounds=7, drafted=[], accepted=[], draft=0.0, verify=0.7, total=0.5 + 0.7 + 0.07)
    drafted = stats(rounds=4, drafted=[4, 4], accepted=[3, 1], draft=0.1, verify=0.6, total=0.5 + 0.1 + 0.6 + 0.1)
    speeds = {REFERENCE: (10, 10, 10), PLAIN: (8, 8, 8), "drafter": (20, 30, 5)}
    counts = {REFERENCE: None, PLAIN: plain, "drafter": drafted}
    return [
        answer(arm, prompt, 60, 60 / speed, counts[arm], peak=None)
        for arm, each in speeds.items()
        for prompt, speed in enumerate(each)
    ]


def figures_of(answers, drafter=CHAIN, differences=None) -> dict[str, dict]:
    arms = report.arm_figures(answers, PROMPTS, {"drafter": drafter}, differences or {})
    assert [arm["name"] for arm in arms] == [REFERENCE, PLAIN, "drafter"]
    return {arm["name"]: arm for arm in arms}


def test_speed_up_is_the_median_over_prompts_and_the_total_is_beside_it():
    arm = figures_of(example())["drafter"]
    assert arm["new_tokens"] == 180
    assert arm["seconds"] == pytest.approx(3 + 2 + 12)
    assert arm["tokens_per_second"] == pytest.approx(180 / 17)
    assert arm["speedup"] == pytest.approx(2.0)
    assert arm["speedup_total"] == pytest.approx(18 / 17)
    assert arm["speedup_over_plain"] == pytest.approx(20 / 8)


def test_transformers_is_the_unit():
    arm = figures_of(example())[REFERENCE]
    assert (arm["speedup"], arm["speedup_total"], arm["tokens_per_round"]) == (1.0, 1.0, 1.0)
    assert "draft_ms_per_round" not in arm


def test_repeats_of_a_prompt_are_added_up_before_the_ratio():
    """The second run of prompt 0 is three times slower: 120 tokens in 12 seconds are 10 tokens/s, 1x."""
    again = [answer("drafter", 0, 60, 9.0), answer(REFERENCE, 0, 60, 6.0), answer(PLAIN, 0, 60, 7.5)]
    arm = figures_of(example() + again)["drafter"]
    assert arm["speedup"] == pytest.approx(1.0)
    assert arm["new_tokens"] == 240


def test_rounds_of_all_answers_are_pooled():
    arm = figures_of(example())["drafter"]
    assert arm["rounds"] == 12
    assert arm["tokens_per_round"] == pytest.approx(2.0)
    assert arm["acceptance_by_depth"] == pytest.approx([0.75, 0.25])
    assert arm["acceptance_rate"] == pytest.approx(0.5)
    times = [arm[f"{part}_ms_per_round"] for part in ("draft", "verify", "other")]
    assert times == pytest.approx([25, 150, 25])


def test_pooling_adds_up_counts_of_different_depths():
    one = answer("arm", 0, 5, 1.0, stats(3, [3, 2], [1, 1], 0.1, 0.2, 1.0))
    other = answer("arm", 1, 5, 1.0, stats(2, [2], [2], 0.3, 0.4, 2.0))
    total = report.total_stats([one, other, answer("arm", 2, 5, 1.0)])
    assert (total.rounds, total.drafted, total.accepted) == (5, [5, 2], [3, 1])
    assert (total.new_tokens, total.prefills) == (6 + 5, 2)
    times = (total.prefill_seconds, total.draft_seconds, total.verify_seconds, total.total_seconds)
    assert times == pytest.approx((1.0, 0.4, 0.6, 3.0))


def test_prediction_for_a_chain_is_the_formula_of_the_literature():
    """Twelve rounds of two drafts: the first is kept 9 times of 12, the second 3 times of those 9, so alpha = 12/21.

    Drafting takes 25 ms a round, a plain pass 100 ms.
    """
    arm = figures_of(example())["drafter"]
    assert arm["alpha"] == pytest.approx(12 / 21)
    assert arm["expected_tokens_per_round"] == pytest.approx(expected_tokens_per_round(12 / 21, 2))
    assert arm["predicted_speedup"] == pytest.approx(arm["expected_tokens_per_round"] / 1.25)


def test_prediction_for_a_tree_is_tokens_over_the_cost_of_a_round():
    """Two tokens in a round of 200 ms, against one in a plain round of 110 ms."""
    arm = figures_of(example(), drafter=TREE)["drafter"]
    assert arm["predicted_speedup"] == pytest.approx(2.0 * 110 / 200)
    assert "alpha" not in arm


def test_answers_of_one_token_have_no_rounds_and_no_prediction():
    empty = stats(0, [], [], 0.0, 0.0, 0.5)
    answers = [answer(arm, prompt, 1, 1.0, empty) for arm in (REFERENCE, PLAIN, "drafter") for prompt in range(3)]
    arm = figures_of(answers)["drafter"]
    assert (arm["tokens_per_round"], arm["rounds"]) == (1.0, 0)
    assert "predicted_speedup" not in arm


def test_tasks_have_figures_of_their_own():
    tasks = figures_of(example())["drafter"]["tasks"]
    assert list(tasks) == ["x", "y"]
    assert tasks["x"]["speedup"] == pytest.approx(2.5)
    assert tasks["y"]["speedup"] == pytest.approx(0.5)
    assert tasks["y"]["tokens_per_round"] == pytest.approx(2.0)


def test_peak_memory_is_the_largest_of_the_answers():
    answers = [answer(each.arm, each.prompt, 60, each.seconds, each.stats, 100 + each.prompt) for each in example()]
    assert figures_of(answers)["drafter"]["peak_memory_bytes"] == 102
    assert figures_of(example())["drafter"]["peak_memory_bytes"] is None


def test_figures_survive_the_json_file(tmp_path):
    near = Divergence(1, 7, 5, 6, 0.25, 0.5, True)
    figures = {"settings": {}, "arms": list(figures_of(example(), differences={"drafter": [near]}).values())}
    report.write_json(figures, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == figures
    assert figures["arms"][2]["diverging_prompts"] == 1


# --- What is printed --------------------------------------------------------------------------------------------------


def printed(arms) -> str:
    page = Console(file=io.StringIO(), width=160)
    report.print_arms(arms, page)
    return page.file.getvalue()


def test_table_has_a_line_per_arm_and_no_colour_codes():
    text = printed(list(figures_of(example()).values()))
    cells = next(line.split() for line in text.splitlines() if line.split()[:1] == ["drafter"])
    assert cells == "drafter 10.6 2.00x 1.06x 2.00 50% .75 .25 25.0 150.0 25.0 2.50x 1.52x".split()
    assert [line.split()[0] for line in text.splitlines() if line.split()[1:2] == ["10.0"]] == [REFERENCE]
    assert "\x1b" not in text


def test_table_by_task_appears_when_there_are_several():
    arms = figures_of(example())
    assert "2.50x (2.00)" in printed(list(arms.values()))
    for arm in arms.values():
        del arm["tasks"]["y"]
    assert "by task" not in printed(list(arms.values()))


def remarks(**differences) -> list[str]:
    return report.remarks(list(figures_of(example(), differences=differences).values()), "bfloat16", REFERENCE)


def test_a_slower_arm_is_said_to_be_slower():
    slower = [line for line in remarks() if "SLOWER" in line]
    assert slower == ["plain is SLOWER than transformers' generate here: 0.80x"]


def test_equal_answers_are_said_to_be_equal():
    assert (
        remarks(plain=[], drafter=[])[-1] == "in bfloat16, every arm gives the tokens of transformers on every prompt"
    )


def test_near_ties_are_counted_and_their_largest_gap_told():
    lines = remarks(plain=[Divergence(0, 3, 1, 2, 0.125, 0.5, True)], drafter=[Divergence(1, 7, 5, 6, 0.25, 0.5, True)])
    assert "plain 1, drafter 1; always at a near-tie" in lines[-1]
    assert "at most 0.250 apart" in lines[-1]


def test_any_other_difference_is_called_a_bug_with_its_place():
    near, wrong = Divergence(0, 3, 1, 2, 0.125, 0.5, True), Divergence(1, 7, 5, None, 2.5, 0.5, False)
    *_, counts, bug = remarks(plain=[near], drafter=[near, wrong])
    assert counts.endswith("plain 1, drafter 2")
    assert bug.startswith("NOT a near-tie, so a bug: drafter, prompt 1, new token 7: 5 against None")
    assert "2.5 apart" in bug


def test_check_has_a_line_per_arm_and_the_first_divergence():
    differences = {
        PLAIN: [],
        "drafter": [Divergence(1, 7, 5, 6, 0.25, 0.5, True), Divergence(2, 0, 1, 2, 3.0, 0.5, False)],
    }
    check = report.check_figures(differences, 3)
    assert [arm["identical"] for arm in check["arms"]] == [3, 1]
    ok, failed, place = report.check_lines(check, lambda tokens: f"<{tokens[0]}>")
    assert ok == "plain: identical on 3/3 prompts"
    assert failed == "drafter: identical on 1/3 prompts"
    assert "prompt 1, new token 7: 5 against 6" in place
    assert "('<5>' / '<6>')" in place


def test_the_answer_shown_is_that_of_the_fastest_arm():
    page = Console(file=io.StringIO(), width=80)
    arms = list(figures_of(example()).values())
    report.print_answer(PROMPTS[0], example(), arms, lambda tokens, skip_special_tokens: f"{len(tokens)} tokens", page)
    assert page.file.getvalue().split("\n")[1:] == [
        "prompt:",
        "a",
        "",
        "answer (drafter, 20.0 tokens/s):",
        "60 tokens",
        "",
    ]


@pytest.mark.parametrize(("terminal", "shown"), [(True, "9/9"), (False, "9 of 9 answers, 0.0 minutes left")])
def test_progress_hands_every_answer_through(terminal, shown):
    notes = Console(file=io.StringIO(), force_terminal=terminal)
    assert report.with_progress(iter(example()), 9, notes) == example()
    assert shown in notes.file.getvalue()
