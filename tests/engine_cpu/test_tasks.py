"""The bundled model's tasks: answers are valid, checkers are exact, the split holds."""

import random
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from stepserve.engine.bundled import tasks
from stepserve.engine.bundled.grammar import Pick, Ref, maybe, pattern, pick, sample_text
from stepserve.engine.bundled.tasks import MIX, TASKS, Problem, correct, held_out, sample
from stepserve.engine.bundled.vocabulary import build_tokenizer


def _first(task: str, kind: str, size: int, seed: int = 0) -> Problem:
    rng = random.Random(seed)
    while True:
        problem = TASKS[task](rng)
        if (problem.kind, problem.size) == (kind, size):
            return problem


def test_grammar_accepts_exactly_what_it_samples() -> None:
    place = pick("place", here=0.7, there=0.3)
    node = (maybe(0.5, " Then"), " go", place, " and stay", Ref("place"), ".")
    rng = random.Random(0)
    texts = {sample_text(node, rng) for _ in range(200)}
    assert len(texts) == 4
    assert all(re.fullmatch(pattern(node), text) for text in texts)
    assert not re.fullmatch(pattern(node), " go here and stay there.")


def test_pick_of_sequences_can_hold_named_picks() -> None:
    node = Pick(((1.0, (pick("a", x=1, y=1), Ref("a"))), (1.0, " none")))
    assert re.fullmatch(pattern(node), " x x")
    assert not re.fullmatch(pattern(node), " x y")


@pytest.mark.parametrize("task", TASKS)
def test_every_sampled_response_is_accepted(task: str) -> None:
    rng = random.Random(3)
    for _ in range(300):
        problem = TASKS[task](rng)
        assert correct(problem, problem.response), problem
        assert correct(problem, f"  {problem.response}\n")


@pytest.mark.parametrize("task", TASKS)
def test_a_dropped_or_repeated_last_word_is_rejected(task: str) -> None:
    rng = random.Random(4)
    for _ in range(300):
        problem = TASKS[task](rng)
        words = problem.response.split()
        assert not correct(problem, " ".join(words[:-1]))
        assert not correct(problem, " ".join([*words, words[-1]]))
        assert not correct(problem, "")


@pytest.mark.parametrize("task", ["lookup", "arithmetic"])
def test_no_response_fits_another_prompt(task: str) -> None:
    rng = random.Random(5)
    problems = [p for p in (TASKS[task](rng) for _ in range(120)) if p.size > 2]
    for problem in problems:
        others = [p for p in problems if p.prompt != problem.prompt]
        assert not any(correct(problem, p.response) for p in others)


def test_lookup_accepts_other_phrasings_but_no_other_path() -> None:
    problem = _first("lookup", "chain", 3)
    path = re.findall(r"([A-Z][a-z]+) (?:told|called) ([A-Z][a-z]+)\.", problem.response)
    assert len(path) == 3
    hops = [f"Then {a} called {b}." for a, b in path]
    last = path[-1][1]
    assert correct(problem, " ".join([*hops, f"{last} is final."]))
    assert not correct(problem, " ".join([*hops[1:], f"{last} is final."]))
    assert not correct(problem, " ".join([*hops, f"{path[0][0]} is final."]))
    assert not correct(problem, f"{last} is final.")


def test_exactly_one_runner_wins() -> None:
    problem = _first("story", "race", 4)
    runners = re.findall(r"[A-Z][a-z]+", problem.prompt.split(":")[1].split("race")[0])
    prize = problem.prompt.split("race for a ")[1].split(".")[0]

    def text(winners: set[str], owner: str) -> str:
        results = ", ".join(f"{n} {'won' if n in winners else 'lost'}" for n in runners)
        return f"{results}. So {owner} got the {prize}. They all went home. The end."

    assert correct(problem, text({runners[2]}, runners[2]))
    assert not correct(problem, text(set(), runners[2]))
    assert not correct(problem, text({runners[0], runners[2]}, runners[2]))
    assert not correct(problem, text({runners[2]}, runners[0]))


def test_exactly_one_item_is_chosen() -> None:
    problem = _first("list", "choose", 3)
    a, b, c = problem.prompt.removeprefix("Choose one: ").rstrip(".").split(", ")
    assert correct(problem, f"{a} no, {b} yes, {c} no. So I take the {b}.")
    assert not correct(problem, f"{a} no, {b} no, {c} no. I take the {b}.")
    assert not correct(problem, f"{a} no, {b} yes, {c} no. I take the {c}.")


def test_a_story_must_repeat_its_own_choices() -> None:
    rng = random.Random(6)
    checked = 0
    while checked < 20:
        problem = TASKS["story"](rng)
        if problem.kind != "tale" or " noon. At noon " not in problem.response:
            continue
        checked += 1
        assert not correct(problem, problem.response.replace("At noon", "At night"))
        night = problem.response.replace("noon", "night")
        assert correct(problem, night)


def test_list_results_are_what_was_asked() -> None:
    rng = random.Random(7)
    for _ in range(300):
        problem = TASKS["list"](rng)
        order, items = problem.prompt.rstrip(".").split(": ")
        listed = items.split(", ")
        expected = {
            "Reverse the list": listed[::-1],
            "Sort up": sorted(listed),
            "Sort down": sorted(listed, reverse=True),
        }.get(order)
        if order.startswith("Keep the "):
            expected = [w for w in listed if w in tasks.CATEGORIES[order[9:]]]
        if expected is not None:
            assert correct(problem, ", ".join(expected) + ".")
            assert not correct(problem, ", ".join(expected[::-1]) + ".") or len(expected) == 1


def test_equations_of_word_problems_hold_and_stay_in_range() -> None:
    rng = random.Random(8)
    for _ in range(300):
        problem = TASKS["arithmetic"](rng)
        value = int(re.findall(r"\d+", problem.prompt)[0])
        equations = re.findall(r"(\d+)([+*-])(\d+)=(\d+)", problem.response)
        assert len(equations) == problem.size
        for left, operation, right, result in equations:
            assert int(left) == value
            change = {"+": value + int(right), "-": value - int(right), "*": value * int(right)}
            value = change[operation]
            assert int(result) == value
            assert 1 <= value <= tasks.MAX_VALUE
        assert f"has {value} " in problem.response


def test_split_keeps_evaluation_prompts_out_of_training() -> None:
    rng = random.Random(9)
    training = [sample(rng) for _ in range(500)]
    evaluation = [sample(rng, evaluation=True) for _ in range(100)]
    assert not any(held_out(p.prompt) for p in training)
    assert all(held_out(p.prompt) for p in evaluation)
    assert {p.task for p in evaluation} == set(MIX)


def test_questions_of_every_task_are_known_and_others_are_not() -> None:
    rng = random.Random(11)
    assert all(tasks.known_question(sample(rng).prompt) for _ in range(2000))
    for prompt in ("Hello!", "What is the capital of France?", "Sort these: 3, 1", "Keep calm."):
        assert not tasks.known_question(prompt)


def test_samples_repeat_with_the_seed() -> None:
    first = [sample(random.Random(10)) for _ in range(3)]
    assert first == [sample(random.Random(10)) for _ in range(3)]


def test_every_word_is_one_token_and_any_text_survives() -> None:
    tokenizer = build_tokenizer()
    for word in tasks.words():
        assert len(tokenizer.encode(word).ids) == 1, word
    for text in ("Émile said: “naïve” 漢字 🙂\n\ttab  two  spaces\r\n12 345", " a", "a", ""):
        shown = text.removeprefix(" ")  # words carry the space before them
        assert tokenizer.decode(tokenizer.encode(text).ids) == shown


def test_shipped_tokenizer_is_the_one_the_recipe_builds() -> None:
    folder = Path(tasks.__file__).parent / "model"
    shipped = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert shipped.to_str() == build_tokenizer().to_str()
