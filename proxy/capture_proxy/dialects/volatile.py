"""What clients put into prompts that says nothing to a model and changes from call to call: named rules, one line each.

Invariant: only whole blocks are left out, never a part of one, and every rule is listed here; the request as it came is in the record.
"""

from __future__ import annotations

import re

RULES: dict[str, re.Pattern[str]] = {
    "claude_billing_line": re.compile(r"x-anthropic-billing-header: [^\n]*\s*\Z"),
}
"""Name -> the whole text of a system block that is left out."""


def dropped(text: str) -> str | None:
    """The name of the rule that leaves this block out, if one does."""
    return next((name for name, pattern in RULES.items() if pattern.match(text)), None)
