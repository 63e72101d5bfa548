"""Writes the generated parts of the pages and of the README: `python docs/generate.py`; `--check` only compares.

A part stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`. So commands, options, settings and public
names are in the documentation because they are in the code.
"""

from __future__ import annotations

import html
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import click
import griffe
from drawings import DRAWINGS

import plancache
from plancache import errors
from plancache.cli import cli
from plancache.outcome import Reason
from plancache.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)

# How the public names are put together; what is not in here comes at the end.
_GROUPS = {
    "A cache": ("open", "default_cache", "PlanCache"),
    "Graphs": ("cached", "pygraph", "last_outcome"),
    "Every graph of a process": ("enable", "disable", "enabled", "jit", "graph_cache"),
    "Devices": ("target", "device", "Device"),
    "Ahead of time": ("warm", "rewarm"),
    "Answers": ("Outcome", "Source", "Reason", "PlanKey"),
    "Errors": ("PlanCacheError",),
}


# ---------------------------------------------------------------- the command line


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command with its full name, groups before what is in them."""
    yield from _below(cli, click.Context(cli, info_name="plancache"))


def _below(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            if not child.hidden:
                yield from _below(child, click.Context(child, info_name=name, parent=context))


def _command_line() -> Iterator[str]:
    for path, command, context in commands():
        usage = " ".join(command.collect_usage_pieces(context))
        yield f"## {path}\n"
        yield f"```text\n{path} {usage}\n```\n"
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            yield f"{_paragraph(paragraph)}\n"
        options = [one for one in command.get_params(context) if isinstance(one, click.Option) and not one.hidden]
        rows = [_option(one, context) for one in options if "--help" not in one.opts]
        if rows:
            yield from _table(("option", "meaning"), rows)
        if isinstance(command, click.Group):
            children = [(path, child.get_short_help_str(200)) for path, child, _ in _children(command, context)]
            rows = [(f"[{path}](#{path.replace(' ', '-')})", _plain(text)) for path, text in children]
            yield from _table(("command", ""), rows)
        if command.epilog:
            yield f"{_paragraph(command.epilog)}\n"


def _option(option: click.Option, context: click.Context) -> tuple[str, str]:
    record = option.get_help_record(context)
    assert record is not None
    name, text = record
    if isinstance(option.type, click.Choice):  # too long for a column that is not torn
        name = name.split(" [")[0]
        said, bracket, rest = text.partition("[default")
        choices = ", ".join(f"`{one}`" for one in option.type.choices)
        text = f"{said.strip()} One of {choices}. {bracket}{rest}"
    return _code(name), _plain(" ".join(text.split()))


def _children(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    depth = context.command_path.count(" ") + 1
    return ((path, one, of) for path, one, of in _below(group, context) if path.count(" ") == depth)


def _paragraph(text: str) -> str:
    """As `--help` has it: what comes after \\b keeps its lines."""
    if text.startswith("\b"):
        return f"```text\n{text.removeprefix(chr(8)).strip(chr(10))}\n```"
    return _plain(" ".join(text.split()))


def _plain(text: str) -> str:
    """Nothing in it is markup, but for code in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*<|\[])", r"\\\1", part) for part in parts)


def _code(text: str) -> str:
    # HTML, since a | in a table cell is one for every reader of Markdown only as an entity.
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


# ---------------------------------------------------------------- settings


def variables() -> Iterator[tuple[str, str]]:
    """Every environment variable with its meaning, from the docstring of `Settings`."""
    meanings = {one.name: one.description for one in _section(Settings, "attributes")}
    for field in fields(Settings):
        found = re.fullmatch(r"`(PLANCACHE_\w+)`: (.*)", " ".join(meanings.get(field.name, "").split()))
        if found is None:
            raise SystemExit(f"Settings.{field.name} has no line in its docstring that begins with its variable")
        yield found[1], found[2].removesuffix(".")


def _environment() -> Iterator[str]:
    yield from _table(("variable", "meaning"), [(f"`{name}`", meaning) for name, meaning in variables()])


def _arguments() -> Iterator[str]:
    known = _section(plancache.open, "parameters")
    yield from _table(
        ("argument", "meaning"),
        [(f"`{one.name}`", " ".join(one.description.split()).removesuffix(".")) for one in known],
    )


def _section(what: Any, kind: str) -> list[Any]:
    sections = griffe.Docstring(what.__doc__).parse("google", warnings=False)
    (found,) = (section.value for section in sections if section.kind.value == kind)
    return list(found)


# ---------------------------------------------------------------- names


def _names() -> Iterator[str]:
    public = [*plancache.__all__, "open"]
    grouped = {name for names in _GROUPS.values() for name in names}
    rest = sorted(set(public) - grouped)
    for title, names in {**_GROUPS, "Others": tuple(rest)}.items():
        there = [name for name in names if name in public]
        if there:
            yield f"## {title}\n"
            for name in there:
                yield from _name(name)


def _name(name: str) -> Iterator[str]:
    """One name; of a class its own members come before those of its bases, whatever order the bases have."""
    value = getattr(plancache, name)
    yield f"::: plancache.{name}"
    if isinstance(value, type) and not issubclass(value, Enum):
        bases = [base for base in value.__mro__ if base.__module__.startswith("plancache")]
        members = dict.fromkeys(member for base in bases for member in vars(base) if not member.startswith("_"))
        yield f"    options:\n      members: [{', '.join(members)}]"
    yield ""


def _answers() -> Iterator[str]:
    """The classes that public names and methods give, and that are no public names themselves."""
    for path in sorted(given(), key=lambda one: (one.rpartition(".")[2], one)):
        yield f"::: {path}\n"


def given() -> set[str]:
    """Where the classes are defined that the signatures of public names and methods speak of, and those within."""
    package = griffe.load("plancache", search_paths=[str(ROOT)])
    public = {_target(package[name]).path for name in [*plancache.__all__, "open"]}
    found: set[str] = set()
    todo = [_target(package[name]) for name in [*plancache.__all__, "open"]]
    while todo:
        one = todo.pop()
        if one.is_class:
            members = [_target(member) for name, member in one.all_members.items() if not name.startswith("_")]
            todo += [member for member in members if member.is_function or member.is_attribute]
        for path in _spoken_of(one):
            kind = _target(package[path.removeprefix("plancache.")])
            if kind.is_class and kind.path not in public | found:
                found.add(kind.path)
                if kind.docstring is not None:
                    todo.append(kind)
    return found


def _spoken_of(one: Any) -> Iterator[str]:
    """The paths of plancache's own names in what a function returns, or in an attribute's type."""
    annotation = one.returns if one.is_function else one.annotation if one.is_attribute else None
    parts = annotation.iterate(flat=True) if isinstance(annotation, griffe.Expr) else ()
    for part in parts:
        path = getattr(part, "canonical_path", "")
        if path.startswith("plancache."):
            yield path


def _target(one: Any) -> Any:
    while one.is_alias:
        one = one.target
    return one


def _failures() -> Iterator[str]:
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.PlanCacheError) and name != "PlanCacheError":
            yield f"::: plancache.errors.{name}\n"


def _reasons() -> Iterator[str]:
    yield from _table(("`Reason`", "in words"), [(f"`{one.name}`", one.value) for one in Reason])


_PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "answers": _answers,
    "arguments": _arguments,
    "commands": _command_line,
    "environment": _environment,
    "errors": _failures,
    "names": _names,
    "reasons": _reasons,
}


def page(text: str) -> str:
    """A page with its generated parts as the code has them now."""
    return _PART.sub(lambda found: f"{found[1]}\n{chr(10).join(_PARTS[found[2]]()).rstrip()}\n\n{found[3]}", text)


def main(arguments: list[str]) -> int:
    """Write, or with `--check` compare; the exit code is 1 if a file is not as the code has it."""
    wanted = {path: page(path.read_text()) for path in PAGES}
    wanted |= {ROOT / "docs" / f"{name}.svg": str(draw()) for name, draw in DRAWINGS.items()}
    stale = {path: text for path, text in wanted.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is not as the code has it: python docs/generate.py")
        else:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)} written")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
