"""The API for people, as a page without scripts: the schema itself is /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any


def write_docs(schema: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td><code>{method.upper()}</code></td><td><code>{escape(path)}</code></td>"
        f"<td>{escape(each.get('description') or each.get('summary', ''))}</td></tr>"
        for path, methods in schema["paths"].items()
        for method, each in methods.items()
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fedthe: the API</title>'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="/static/page.css"></head>'
        "<body><main><h1>The API</h1><p>The schema is <a href='/openapi.json'>/openapi.json</a>; the page to try it is "
        "<a href='/'>/</a>.</p><table><thead><tr><th>method</th><th>path</th><th>what it does</th></tr></thead><tbody>"
        f"{''.join(rows)}</tbody></table></main></body></html>"
    )
