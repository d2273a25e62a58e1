"""The comments behind the fields of a dataclass: what `fedthe settings` and `fedthe methods` print."""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from dataclasses import dataclass


@dataclass(frozen=True)
class Comment:
    text: str  # on the line of the field
    section: str  # on a line of its own above it, and above the fields before it


def read_comments(kind: type) -> dict[str, Comment]:
    """By field, those of base classes too; {} for a class without source."""
    found: dict[str, Comment] = {}
    for each in reversed(kind.__mro__[:-1]):
        found |= _read_own(each)
    return found


def _read_own(kind: type) -> dict[str, Comment]:
    try:
        source = textwrap.dedent(inspect.getsource(kind))
        (body,) = ast.parse(source).body
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, ValueError, SyntaxError, tokenize.TokenError):  # made in a notebook or by `exec`
        return {}
    beside, above = dict[int, str](), dict[int, str]()
    for token in tokens:
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            (above if alone else beside)[token.start[0]] = token.string.lstrip("# ").rstrip()
    found: dict[str, Comment] = {}
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            sections = [text for line, text in above.items() if line < node.lineno]
            text = beside.get(node.end_lineno or node.lineno, "")
            found[node.target.id] = Comment(text, sections[-1] if sections else "")
    return found
