"""A page as a policy sees it and acts on it: its accessibility tree as text, in which each element that can be acted on has a number.

Invariant: a seed's page looks the same in every session (numbers are given in the order of the tree, and what is left to chance is drawn
here), and only what a hand could do is done: a click hits what lies on top at that place, text goes where the focus is.
"""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .chromium import BrowserError, Chromium

PAGES = Path(__file__).parent / "pages"
TASKS = tuple(sorted(path.stem for path in PAGES.glob("*.html")))
DRAWS = 32
"""Random numbers that a page may use."""
_SKIPPED = {"none", "generic", "InlineTextBox", "MenuListPopup"}
_TEXT = "StaticText"
_STATES = ("focused", "checked", "selected", "disabled", "required")
_KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Backspace": (8, ""),
    "Escape": (27, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
    " ": (32, " "),
}
"""Name of a key -> its code and the text that it types."""
_IS_FIELD = """function() {
    const writable = !this.disabled && !this.readOnly;
    const other = ["button", "submit", "reset", "checkbox", "radio", "file", "image", "range", "color"];
    return writable && (this instanceof HTMLTextAreaElement || this instanceof HTMLInputElement && !other.includes(this.type));
}"""
_CHOOSE = """function(text) {
    if (!(this instanceof HTMLSelectElement) || this.disabled) return "no list";
    const index = [...this.options].findIndex((option) => option.text === text && !option.disabled);
    if (index < 0) return "no option";
    this.focus();
    this.selectedIndex = index;
    for (const kind of ["input", "change"]) this.dispatchEvent(new Event(kind, {bubbles: true}));
    return "";
}"""


class ActionError(Exception):
    """What the policy asked for cannot be done; the page is as it was."""


class Page:
    """`begin` shows a task's page. For one thread."""

    def __init__(self, browser: Chromium) -> None:
        self._browser = browser
        self._bids: dict[int, str] = {}
        """DOM node -> bid: all that this page has shown so far."""
        self._actions: dict[str, Callable[..., None]] = {
            "click": self._click,
            "fill": self._fill,
            "select_option": self._select,
            "send_keys": self._send_keys,
            "scroll": self._scroll,
            "noop": lambda: None,
        }

    def begin(self, task: str, seed: int) -> str:
        """The goal."""
        self._bids = {}
        self._browser.open(f"{task}.html")
        draw = random.Random(seed)
        return str(self._browser.evaluate(f"task.begin({[draw.random() for _ in range(DRAWS)]})"))

    def result(self) -> tuple[bool, float]:
        """(whether the task has ended, its reward)."""
        found = self._browser.evaluate("task.result")
        return bool(found["done"]), float(found["reward"])

    def text(self) -> str:
        nodes = {node["nodeId"]: node for node in self._browser.call("Accessibility.getFullAXTree")["nodes"]}
        root = next(node for node in nodes.values() if "parentId" not in node)
        return "\n".join(self._lines(root, nodes, 0, ()))

    def _lines(self, node: dict[str, Any], nodes: dict[str, Any], depth: int, above: tuple[str, ...]) -> Iterator[str]:
        """`above`: what the element around it shows already; a text that only repeats it is left out."""
        role, name = node.get("role", {}).get("value", ""), node.get("name", {}).get("value", "")
        if not node.get("ignored") and role not in _SKIPPED and not (role == _TEXT and name in above):
            yield "\t" * depth + self._line(node, role, name)
            depth, above = depth + 1, (name, str(node.get("value", {}).get("value")))
        for child in node.get("childIds", []):
            if child in nodes:
                yield from self._lines(nodes[child], nodes, depth, above)

    def _line(self, node: dict[str, Any], role: str, name: str) -> str:
        properties = {item["name"]: item["value"].get("value") for item in node.get("properties", [])}
        about = [state for state in _STATES if properties.get(state) in (True, "true")]
        if "value" in node:
            about.insert(0, f"value={node['value'].get('value')!r}")
        number = ""
        if role not in (_TEXT, "RootWebArea") and "backendDOMNodeId" in node:
            number = f"[{self._bids.setdefault(node['backendDOMNodeId'], str(len(self._bids) + 1))}] "
        return ", ".join([f"{number}{role} {name!r}", *about])

    def act(self, action: str) -> None:
        """Raises ActionError."""
        name, arguments = parsed(action)
        if name not in self._actions:
            raise ActionError(f"there is no action {name}; known: {', '.join(self._actions)}")
        wanted = len(inspect.signature(self._actions[name]).parameters)
        if len(arguments) != wanted:
            raise ActionError(f"{name} takes {wanted} arguments, not {len(arguments)}")
        try:
            self._actions[name](*arguments)
        except BrowserError as error:
            raise ActionError(f"{name}: {error}") from None

    def _node(self, bid: str) -> int:
        for node, known in self._bids.items():
            if known == bid.strip("[]"):
                return node
        raise ActionError(f"there is no element {bid!r}; the page shows {', '.join(self._bids.values())}")

    def _click(self, bid: str) -> None:
        node, call = self._node(bid), self._browser.call
        call("DOM.scrollIntoViewIfNeeded", backendNodeId=node)
        quads = call("DOM.getContentQuads", backendNodeId=node)["quads"]
        if not quads:
            raise ActionError(f"element {bid} is not visible")
        where = {"x": sum(quads[0][0::2]) / 4, "y": sum(quads[0][1::2]) / 4}
        for kind in ("mousePressed", "mouseReleased"):
            call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def _fill(self, bid: str, text: str) -> None:
        node = self._node(bid)
        if not self._browser.apply(node, _IS_FIELD):
            raise ActionError(f"element {bid} is no field that can be filled")
        self._browser.apply(node, "function() { this.focus(); this.select(); document.execCommand('delete'); }")
        self._browser.call("Input.insertText", text=text)

    def _select(self, bid: str, option: str) -> None:
        chosen = self._browser.apply(self._node(bid), _CHOOSE, option)
        if chosen:
            raise ActionError(f"element {bid} is no list" if chosen == "no list" else f"list {bid} has no option {option!r}")

    def _send_keys(self, text: str) -> None:
        if text not in _KEYS:
            self._browser.call("Input.insertText", text=text)
            return
        code, typed = _KEYS[text]
        about = {"key": text, "windowsVirtualKeyCode": code}
        self._browser.call("Input.dispatchKeyEvent", type="keyDown" if typed else "rawKeyDown", text=typed, **about)
        self._browser.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def _scroll(self, direction: str) -> None:
        if direction not in ("up", "down"):
            raise ActionError("scroll 'up' or 'down'")
        self._browser.evaluate(f"window.scrollBy(0, {'-' if direction == 'up' else ''}window.innerHeight / 2)")


def parsed(action: str) -> tuple[str, list[str]]:
    """`fill('7', 'Ada')` as a name and its arguments, all of them texts. Raises ActionError."""
    try:
        call = ast.parse(action.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        call = None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords:
        values = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        if len(values) == len(call.args) and all(isinstance(value, str) for value in values):
            return call.func.id, [str(value) for value in values]
    raise ActionError(f"{action[:100]!r} is no action; write one call, such as click('3') or fill('3', 'text')")
