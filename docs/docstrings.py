# SPDX-License-Identifier: Apache-2.0
"""From this project's docstrings to reStructuredText, for the site.

A docstring is plain text with sections, a capitalised word and a colon. ``Args:`` and ``Attributes:`` hold entries,
``name, name: text`` with deeper lines below; others, such as ``Returns:``, hold one text that may begin on the same
line. Sections become fields, entries a list of definitions, and indented lines after a blank one a block of code.
Nothing here knows Sphinx.
"""

from __future__ import annotations

import re

_SECTION = re.compile(r"^([A-Z][a-z]+):(?: (.*))?$")
_ENTRY = re.compile(r"^((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): (.*)$")
_NAMES = re.compile(r"^\*{0,2}\w+(?:, \*{0,2}\w+)*,$")  # of an entry whose names take more than one line
_CODE = re.compile(r"(``.*?``)")
_INDENT = "    "


def to_rst(docstring: str) -> list[str]:
    """Return the lines of reStructuredText that say what ``docstring``, without its indentation, says."""
    lines = docstring.strip("\n").splitlines()
    done: list[str] = []
    at = 0
    while at < len(lines):
        section = _SECTION.match(lines[at])
        end = _end_of_indented(lines, at + 1)
        if section and section[2] and end == at + 1:
            end = _end_of_paragraph(lines, end)
        if section and (section[2] or end > at + 1):
            body = [line.removeprefix(_INDENT) for line in lines[at + 1 : end]]
            done += ["", *_field(section[1], section[2] or "", body), ""]
        elif lines[at].startswith(_INDENT) and at > 0 and not lines[at - 1].strip():
            end = _end_of_indented(lines, at, with_blanks=True)
            done += ["::", "", *lines[at:end], ""]
        else:
            end = at + 1
            done.append(escape(lines[at].strip()))  # a hanging indent goes on with its paragraph
        at = end
    return done


def escape(text: str) -> str:
    """Return ``text`` so that nothing in it but ``code`` and a leading bullet is markup."""
    bullet, rest = ("* ", text[2:]) if text.startswith("* ") else ("", text)
    parts = _CODE.split(rest)
    plain = [re.sub(r"([*|`\\]|(?<=\w)_(?!\w))", r"\\\1", part) for part in parts[::2]]
    return bullet + "".join(part + code for part, code in zip(plain, [*parts[1::2], ""], strict=True))


def _end_of_indented(lines: list[str], start: int, with_blanks: bool = False) -> int:
    end = start
    while end < len(lines) and (lines[end].startswith(_INDENT) or (with_blanks and not lines[end].strip())):
        end += 1
    return end


def _end_of_paragraph(lines: list[str], start: int) -> int:
    end = start
    while end < len(lines) and lines[end].strip() and not _SECTION.match(lines[end]):
        end += 1
    return end


def _field(name: str, first: str, body: list[str]) -> list[str]:
    if name in ("Args", "Attributes") and not first:
        return [f":{name}:", *(_INDENT + line if line else "" for line in _definitions(body))]
    text = [first, *(line.strip() for line in body)]
    return [f":{name}:", *(_INDENT + escape(line) for line in text if line)]


def _definitions(body: list[str]) -> list[str]:
    """Return a definition list; lines before the first entry are a paragraph."""
    done: list[str] = []
    names_so_far = ""
    for given in body:
        line = f"{names_so_far} {given.strip()}" if names_so_far else given
        names_so_far = line if _NAMES.match(line) else ""
        if names_so_far:
            continue
        entry = _ENTRY.match(line)
        if entry:
            names = ", ".join(f"``{name}``" for name in entry[1].split(", "))
            done += ["", names, _INDENT + escape(entry[2])]
        else:
            done.append((_INDENT if done else "") + escape(line.strip()))
    return done
