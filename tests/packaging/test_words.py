"""The check of words finds what it denies, wherever it is written."""

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "check_words.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("check_words", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(text):
    return [hit.word for hit in load_tool().find("page.md", text)]


def test_a_denied_word_is_found_with_its_line_and_a_better_one():
    (hit,) = load_tool().find("page.md", "One line.\nNobody is named.\n")
    assert ("page.md", 2, "Nobody") == hit[:3]
    assert hit.advice


def test_identifiers_and_comments_are_searched():
    assert ["culprits"] == words("report.culprits  # names")
    assert ["clean steps"] == words("# after 20 clean steps")


def test_names_of_classes_and_of_ranks_that_make_one_decision_are_searched():
    assert ["Stepper"] == words("class Stepper:")
    assert ["ranks agree"] == words("Here all ranks agree.")


def test_parts_of_other_words_and_names_of_tensorflow_are_allowed():
    assert [] == words("nested structures, honest, tf.nest.flatten, bad_steps, verbose")


def test_no_entry_of_the_unconverted_folders_is_missing():
    tool = load_tool()
    assert [] == [path for path in tool.UNCONVERTED if not (tool.ROOT / path).exists()]
