"""The documentation is whole: every command, option, setting, public name and method is in it, and its site builds."""

import importlib.util
import os
import re
import subprocess
import sys
from enum import Enum
from functools import cache
from html.parser import HTMLParser

import click
import griffe
import pytest

import plancache
from plancache import errors
from plancache.cli import cli
from plancache.outcome import Reason
from plancache.settings import MODES
from tests.conftest import ROOT

DOCS = ROOT / "docs"
GENERATE = DOCS / "generate.py"


def page(name):
    return (DOCS / f"{name}.md").read_text()


@cache
def generator():
    sys.path.insert(0, str(DOCS))
    try:
        spec = importlib.util.spec_from_file_location("generate", GENERATE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site's directory. A warning of any kind fails (but not with --quiet, which would hide it)."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return out


def commands(command=cli, name="plancache"):
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            yield from commands(command.get_command(context, child), f"{name} {child}")


class Page(HTMLParser):
    """What a built page loads from elsewhere, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.loaded = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.add(given.get("id"))
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(given.get("src") or "")
        if tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given.get("href") or "")


def test_the_generated_parts_are_as_the_code_has_them():
    done = subprocess.run(
        [sys.executable, str(GENERATE), "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_a_part_that_is_not_as_the_code_has_it_is_noticed():
    text = page("settings")
    generate = generator()
    assert generate.page(text) == text
    assert generate.page(text.replace("PLANCACHE_WAIT", "PLANCACHE_PATIENCE")) == text


def test_every_command_and_every_option_is_in_the_reference():
    text = page("cli")
    seen = 0
    for name, command in commands():
        section = re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section, f"{name} is missing"
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                seen += 1
                assert all(f"{one}" in section[1] for one in option.opts), (name, option.opts)
                assert option.help, f"{name} {option.opts[0]} says nothing"
    assert seen > 30


def test_every_variable_that_is_read_is_in_the_reference_and_in_the_readme():
    source = "".join(file.read_text() for file in (ROOT / "plancache").rglob("*.py"))
    names = set(re.findall(r"(?<![A-Z_])PLANCACHE_[A-Z_]+\b", source))
    assert len(names) > 8
    readme = (ROOT / "README.md").read_text()
    for name in names:
        assert f"| `{name}` |" in page("settings"), name
        assert f"| `{name}` |" in readme, name


def test_every_mode_and_every_reason_is_described():
    assert all(f"| `{mode}` |" in page("settings") for mode in MODES)
    assert all(f"| `{reason.name}` | {reason.value} |" in page("misses") for reason in Reason)


def members(value):
    """The public members that a class has of plancache's own. Those of enumerations are described as a table."""
    bases = (
        [] if issubclass(value, Enum) else [base for base in value.__mro__ if base.__module__.startswith("plancache")]
    )
    return {name for base in bases for name in vars(base) if not name.startswith("_")}


def test_every_public_name_method_and_error_is_in_the_built_reference(site):
    anchors = Page((site / "api.html").read_text()).anchors
    for name in (*plancache.__all__, "open"):
        assert f"plancache.{name}" in anchors, name
        value = getattr(plancache, name)
        sections = griffe.Docstring(value.__doc__).parse("google", warnings=False)
        attributes = {one.name for section in sections if section.kind.value == "attributes" for one in section.value}
        for member in members(value) if isinstance(value, type) else ():
            assert f"plancache.{name}.{member}" in anchors or member in attributes, f"{name}.{member}"
    assert "plancache.PlanCache.build" in anchors
    anchors = Page((site / "errors.html").read_text()).anchors
    for name, value in vars(errors).items():
        if isinstance(value, type) and name != "PlanCacheError" and issubclass(value, errors.PlanCacheError):
            assert f"plancache.errors.{name}" in anchors, name


def test_every_argument_of_a_public_name_is_described():
    package = griffe.load("plancache", search_paths=[str(ROOT)])
    for name in (*plancache.__all__, "open"):
        one = package[name].final_target if package[name].is_alias else package[name]
        functions = [one] if one.is_function else []
        if one.is_class:
            functions = [
                member.final_target if member.is_alias else member
                for member in one.all_members.values()
                if member.is_function and not member.name.startswith("_")
            ]
        for function in functions:
            text = function.docstring.value
            if re.search(r"\b(A|a)rguments( and errors)? are (those|as)\b|as for `", text):
                continue
            sections = function.docstring.parse("google", warnings=False)
            described = {
                one.name.lstrip("*") for part in sections if part.kind.value == "parameters" for one in part.value
            }
            given = {parameter.name for parameter in function.parameters} - {"self", "cls"}
            assert given <= described, (function.path, given - described)


def test_the_site_loads_nothing_from_the_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for file in pages:
        elsewhere = [one for one in Page(file.read_text()).loaded if re.match(r"(https?:)?//", one)]
        assert not elsewhere, (file.name, elsewhere)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet.name


def test_every_drawing_is_shown_and_says_what_it_shows(site):
    pages = "".join(file.read_text() for file in DOCS.glob("*.md"))
    drawings = list(DOCS.glob("*.svg"))
    assert drawings
    for drawing in drawings:
        assert re.search(rf"!\[[^\]]{{20,}}\]\({drawing.name}\)", pages), drawing.name
        assert "<title>" in drawing.read_text()


def spoken_of(text):
    """Commands in running text, and in blocks that are not run: the words up to where the shell takes over."""
    inline = re.findall(r"`(plancache [^`\n]*)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    shown = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^(?:RUN |[A-Z_]+=\S+ )*(plancache .*)$", "\n".join(shown), re.MULTILINE)
    for command in (*inline, *lines):
        yield re.sub(r" (--dir|--store) \S+", "", re.split(r"[|#&>;$]", command)[0]).split()[1:]


@pytest.mark.parametrize("file", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda file: file.name)
def test_commands_that_are_only_spoken_of_exist(file):
    known = dict(commands())
    for words in spoken_of(file.read_text()):
        if words[:1] in ([], ["COMMAND"], ["[OPTIONS]"]):
            continue
        name = "plancache"
        while words and f"{name} {words[0]}" in known:
            name += f" {words.pop(0)}"
        options = {word for word in words if word.startswith("-")}
        assert options or name != "plancache", words
        asked = {one for option in known[name].params for one in option.opts} | {"--help", "-h", "--version"}
        assert options <= asked, (name, words)


def test_a_command_that_does_not_exist_is_noticed():
    assert list(spoken_of("see `plancache --dir D lss --all | head`")) == [["lss", "--all"]]
    assert list(spoken_of("```text\nRUN plancache warm x\nplan  engine\n```\n")) == [["warm", "x"]]
