"""Tools from Python functions, against what `transformers` gives for the same ones."""

from __future__ import annotations

import functools
from enum import Enum
from typing import Annotated, Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from harness_rl.errors import UserError
from harness_rl.sessions.toolschema import parse_docstring, tool_schema


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def everything(
    a: int,
    b: list[str],
    f: float,
    flag: bool,
    c: Optional[str] = None,  # noqa: UP045
    d: Literal["x", "y"] = "x",
    e: Union[int, str] = 1,  # noqa: UP007
    g: dict[str, int] | None = None,
    h: tuple[int, str] | None = None,
    i: Any = None,
    j: dict | None = None,
    k: list | tuple = (),
    m: int | None = None,
    n: list[dict[str, float]] | str = "",
    o: Colour = Colour.RED,
    p: Literal[1, "one"] = 1,
) -> str:
    """Does many things.

    And more of them,
      on several lines.

    Args:
        a: The a
            goes on here
        b (list): The b: with a colon
        f: f
        flag: flag
        c (str, optional): The c
        d: d
        e: e
        g: g
        h: h
        i: i
        j: j
        k: k
        m: m (choices: [1, 2])
        n: n
        o: o
        p: p

    Returns:
        A string: of some sort

    Raises:
        ValueError: never
    """
    return ""


def bare() -> None:
    """Does nothing."""


class Game:
    def guess(self, word: str) -> str:
        """Guess a word.

        Args:
            word: Five letters.
        """
        return word

    async def wait(self, seconds: float = 1.0) -> None:
        """
        Wait a while.

        Args:
            seconds: How long.
        """


@pytest.mark.parametrize("function", [everything, bare, Game.guess, Game().guess, Game.wait])
def test_a_schema_is_what_transformers_makes_of_the_function(function):
    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert tool_schema(function) == expected


def test_a_partial_function_is_shown_without_its_bound_arguments():
    assert tool_schema(functools.partial(Game.guess, Game()))["function"]["name"] == "guess"
    assert set(tool_schema(functools.partial(Game.guess, Game()))["function"]["parameters"]["properties"]) == {"word"}


def test_annotated_is_its_type():
    def tool(x: Annotated[int, "metres"]) -> None:
        """T.

        Args:
            x: x
        """

    tool.__annotations__["x"] = Annotated[int, "metres"]
    assert tool_schema(tool)["function"]["parameters"]["properties"]["x"] == {"type": "integer", "description": "x"}


def no_docstring(x: int) -> None: ...


def no_description(x: int) -> None:
    """
    Args:
        x: x
    """


def no_hint(x) -> None:
    """T.

    Args:
        x: x
    """


def undescribed(x: int) -> None:
    """T."""


def odd_type(x: Game) -> None:
    """T.

    Args:
        x: x
    """


def starred(*x: int) -> None:
    """T."""


def open_ended(x: tuple[int, ...]) -> None:
    """T.

    Args:
        x: x
    """


def bad_choices(x: int) -> None:
    """T.

    Args:
        x: x (choices: one or two)
    """


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_docstring, "tool no_docstring has no docstring; say what it does"),
        (no_description, "no_description: its docstring does not say what it does"),
        (no_hint, "no_hint: argument x has no type hint; write x: str"),
        (undescribed, "undescribed: argument x is not described; add 'x: ...' under 'Args:'"),
        (odd_type, "odd_type: argument x: a model cannot be shown the type Game; use int"),
        (starred, "starred: .args and ..kwargs cannot be shown"),
        (open_ended, "open_ended: argument x: a model cannot be shown the type tuple"),
        (bad_choices, "bad_choices: argument x: its choices are not a JSON list"),
    ],
)
def test_a_gap_is_an_error_that_names_function_and_fix(function, words):
    with pytest.raises(UserError, match=words) as caught:
        tool_schema(function)
    assert "\n" not in str(caught.value)


def test_a_method_is_named_with_its_class():
    with pytest.raises(UserError, match=r"tool Game\.undescribed: argument x"):
        tool_schema(undescribed, "Game")


def test_sections_that_are_not_arguments_are_left_out():
    doc = parse_docstring("Plays.\n\nArgs:\n    x: one\n    y: two\n        more: text\n\nReturns:\n    z: three")
    assert (doc.description, doc.arguments) == ("Plays.", {"x": "one", "y": "two more: text"})
