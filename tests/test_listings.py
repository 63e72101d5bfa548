"""What listings promise: columns that fit, stable names in JSON and CSV, filters, sorting, one command a question."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import plancache
from plancache.cli import cli
from plancache.cli.listing import FIELDS, duration, printable, size_text
from plancache.cudnn import drawing
from plancache.cudnn.graph import labels
from plancache.cudnn.listing import summary
from plancache.cudnn.plans import declare
from plancache.store import records
from tests import graphs
from tests.conftest import ROOT


def invoke(*arguments, code=0, **environment):
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], env=environment)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def listed(path, *options):
    return [json.loads(line) for line in invoke("--dir", path, "ls", "--json", *options).splitlines()]


@pytest.mark.parametrize(("width", "named"), [(80, False), (200, True)])
def test_ls_fits_its_width_and_shows_more_where_there_is_room(warm, width, named):
    lines = invoke("--dir", warm, "ls", COLUMNS=str(width)).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == 1 + 3 + 1
    assert any("conv 8×64×28×28 * 64×64×3×3 → relu, f16" in line for line in lines)
    assert all(("H200" in line) == named for line in lines[1:4])
    assert ("builder" in lines[0]) == named


def test_verbose_shows_every_column_whole(warm):
    rows = listed(warm)
    output = invoke("--dir", warm, "ls", "-v")
    assert all(row[name] in output for row in rows for name in ("key", "operation", "name"))


def test_json_and_csv_have_the_same_stable_names(warm):
    rows = listed(warm)
    assert [list(row) for row in rows] == [list(FIELDS)] * 3
    found = list(csv.DictReader(io.StringIO(invoke("--dir", warm, "ls", "--csv"))))
    assert [{name: str(row[name]) for name in FIELDS} for row in rows] == found
    assert {(row["device_name"], row["cudnn"].count(".")) for row in rows} == {("NVIDIA H200", 2)}


def test_rows_are_selected_by_operation_device_name_and_cudnn_version(warm):
    version = listed(warm)[0]["cudnn"]
    major, minor, _ = version.split(".")
    for options, count in (
        (("--op", "CONV"), 1),
        (("--op", "matmul 1x64x64"), 1),
        (("--op", "relu"), 2),
        (("--device", "h200"), 3),
        (("--device", "b200"), 0),
        (("--env", version), 3),
        (("--env", f"{major}.{minor}"), 3),
        (("--env", f"{major}.{minor[:-1]}"), 0),
        (("--device", "h200", "--op", "sdpa", "--since", "1h"), 1),
    ):
        assert len(listed(warm, *options)) == count, options


def test_rows_are_sorted_the_largest_or_first_letter_first(warm):
    every = {name: [row[name] for row in listed(warm, "--sort", name)] for name in ("seconds", "key", "created")}
    assert every["seconds"] == sorted(every["seconds"], reverse=True)
    assert every["created"] == sorted(every["created"], reverse=True)
    assert every["key"] == sorted(every["key"])
    assert [row["key"] for row in listed(warm, "--sort", "key", "--reverse")] == every["key"][::-1]
    assert [row["operation"].split()[0] for row in listed(warm, "--sort", "op")] == ["conv", "matmul", "sdpa"]


def test_kernels_are_listed_sorted_and_selected_as_plans_are(tmp_path, targeted):
    with plancache.open(tmp_path) as cache:
        for width in (64, 66):  # kernels of two alignments
            graph = graphs.new(is_dynamic_shape_enabled=True)
            a = graph.tensor(dim=[1, 32, 64], stride=[2048, 64, 1])
            b = graph.tensor(dim=[1, 64, width], stride=[64 * width, width, 1])
            graph.matmul(a, b).set_output(True)
            cache.build(graph)

    def kernels(*options):
        return invoke("--dir", tmp_path, "ls", "--kernels", *options).splitlines()

    rows = listed(tmp_path, "--kernels")
    assert kernels()[-1].startswith(f"{len(rows)} kernels of ")  # without the headers of their caches
    assert len(rows) > 1
    version = rows[0]["cudnn"]
    assert version.count(".") == 2
    assert len(listed(tmp_path, "--kernels", "--env", version)) == len(rows)
    assert not listed(tmp_path, "--kernels", "--env", "1.0")
    for options in (("--sort", "created"), ("--sort", "created", "--reverse")):
        keys = [row["key"][:12] for row in listed(tmp_path, "--kernels", *options)]
        assert [line[:12] for line in kernels(*options)[1:-1]] == keys


def test_what_would_run_here_without_compiling_is_one_command(warm, tmp_path):
    assert len(listed(warm, "--here", "--device", "h200")) == 3
    with plancache.open(warm) as cache:
        for change in ({"environment": "e" * 64}, {"driver": 99000}, {"route": "native"}, {"device": "d" * 64}):
            row = replace(next(cache.rows()).row, key=json.dumps(change)[::-1].ljust(64), **change)
            cache.store.put(row, records.encode(row, {}))
    assert len(listed(warm)) == 7
    assert len(listed(warm, "--here", "--device", "h200")) == 3
    older = json.loads(plancache.device("h200").to_json())
    (tmp_path / "older.json").write_text(json.dumps({**older, "driverVer": 12000}))
    assert listed(warm, "--here", "--device", tmp_path / "older.json") == []


def test_what_layers_hold_would_run_here_too_and_is_listed_once(warm, tmp_path):
    bundle, top = tmp_path / "plans.bundle", tmp_path / "top"
    every = {row["key"] for row in listed(warm)}
    invoke("--dir", warm, "export", bundle)
    layers = {"PLANCACHE_LAYERS": f"{bundle}:{tmp_path / 'nowhere'}"}

    def here(code=0, **environment):
        output = invoke("--dir", top, "ls", "--json", "--here", "--device", "h200", code=code, **environment)
        return [json.loads(line) for line in output.splitlines()]

    assert not here(code=1)  # there is no cache
    found = here(**layers)
    assert {(row["key"], row["device_name"], row["cudnn"].count(".")) for row in found} == {
        (key, "NVIDIA H200", 2) for key in every
    }
    invoke("--dir", top, "import", bundle)
    assert {row["key"] for row in here(**layers)} == every
    assert len(here(**layers)) == len(every)


def test_without_a_gpu_and_a_name_here_says_what_to_name(warm):
    try:
        plancache.device(None)
    except plancache.PlanCacheError:
        assert "--here --device h200" in invoke("--dir", warm, "ls", "--here", code=1)
    else:
        pytest.skip("this host has a GPU")


def test_prune_removes_what_the_options_select_and_lists_it(warm):
    selected = ("--op", "sdpa")
    gone = [json.loads(line) for line in invoke("--dir", warm, "prune", *selected, "--dry-run", "--json").splitlines()]
    assert [list(row) for row in gone] == [list(FIELDS)]
    assert len(listed(warm)) == 3
    assert "1 plans" in invoke("--dir", warm, "prune", *selected)
    assert {row["operation"].split()[0] for row in listed(warm)} == {"conv", "matmul"}
    assert "1 plans" in invoke("--dir", warm, "prune", "--op", "relu", "--max-bytes", "20K")
    key = listed(warm)[0]["key"]
    assert "1 plans" in invoke("--dir", warm, "prune", key[:8])
    assert listed(warm) == []


def test_stats_says_how_big_how_useful_and_whether_it_may_be_deleted(warm, targeted):
    # Other tests of the session may have been served from the cache that this is a copy of.
    before = json.loads(invoke("--dir", warm, "stats", "--json"))
    with plancache.open(warm) as cache:
        for _ in range(3):
            cache.build(graphs.sdpa()[0])
    hits, misses = before["hits"] + 3, sum(before["misses"].values())
    lines = invoke("--dir", warm, "stats", "-v").splitlines()
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    share = f"{hits} ({100 * hits / (hits + misses):.0f}% of {hits + misses}) since"
    for part in ("3 plans", share, "no entry", "is safe", "NVIDIA H200", "cuDNN 9."):
        assert part in text
    whole = json.loads(invoke("--dir", warm, "stats", "--json"))
    assert (whole["hits"], whole["misses"], whole["plans"]) == (hits, before["misses"], 3)
    assert whole["saved"] - before["saved"] > 0.3
    assert [(one["device_name"], one["hits"]) for one in whole["devices"]] == [("NVIDIA H200", hits)]
    found = list(csv.DictReader(io.StringIO(invoke("--dir", warm, "stats", "--csv"))))
    assert [(one["part"], one["hits"]) for one in found] == [
        (part, str(hits)) for part in ("all", "device", "environment")
    ]
    assert listed(warm, "--op", "sdpa")[0]["hits"] >= 3
    assert "may be deleted" in invoke("--dir", warm, "path", "-v")


def test_what_is_stored_moves_no_cursor(warm):
    with plancache.open(warm) as cache:
        row = next(cache.rows()).row
        evil = replace(row, key="f" * 64, builder="a\x1b[2Jb", operation="c\x1b]0;d\x07\n[red]e[/red]")
        _, fields = records.decode(cache.store.get(row.key, row.route))
        cache.store.put(evil, records.encode(evil, fields))
    for command in (("ls",), ("ls", "-v"), ("show", "ffff")):
        output = invoke("--dir", warm, *command, COLUMNS="200")
        assert "\x1b" not in output
        assert "\x07" not in output
        assert "[red]e[/red]" in output
    assert printable("conv 1×2 → relu") == "conv 1×2 → relu"


def test_nothing_is_coloured_where_nobody_looks(warm):
    for command in (("ls",), ("stats",), ("show", listed(warm)[0]["key"])):
        done = subprocess.run(
            [sys.executable, "-m", "plancache", "--dir", str(warm), *command],
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, "TERM": "xterm-256color"},
            check=True,
        )
        assert b"\x1b" not in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_shells_script(shell):
    assert "_PLANCACHE_COMPLETE" in invoke("completion", shell)


def test_a_shell_completes_commands_and_options():
    environment = {"_PLANCACHE_COMPLETE": "bash_complete", "COMP_WORDS": "plancache ls --he", "COMP_CWORD": "2"}
    source = "from plancache.cli import cli; cli(prog_name='plancache')"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    assert "plain,--here" in done.stdout.split() or "plain,--help" in done.stdout.split()


def test_exit_codes_are_in_the_help():
    assert re.search(r"Exit codes: 0 done; 1 .* 2 wrong usage", " ".join(invoke("--help").split()))


def test_numbers_are_written_as_people_read_them():
    assert [duration(one) for one in (0.0, 59.94, 60, 3599.6, 5400, 86400, 100_000)] == [
        *("0.0 s", "59.9 s", "1 min", "1 h", "1 h 30 min", "1 d", "1 d 3 h")
    ]
    assert [size_text(one) for one in (0, 1023, 1536, 5 << 30)] == ["0 bytes", "1023 bytes", "1.5 KB", "5.0 GB"]


# ------------------------------------------------------------ graphs


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        (graphs.conv, "conv 8×64×28×28 * 64×64×3×3 → relu, f16"),
        (graphs.matmul, "matmul 1×64×64 * 1×64×128 → relu, f16"),
        (graphs.sdpa, "sdpa 2×8×512×128 causal, f16"),
        (graphs.unary, "relu 1×64×64, f16"),
    ],
    ids=["conv", "matmul", "sdpa", "unary"],
)
def test_a_graph_in_a_few_words(builder, words, targeted):
    assert summary(declare(builder()[0]).document) == words


def gated():
    """Two matmuls of one input, of which one's way is longer: an edge goes past a layer."""
    graph = graphs.new()
    x = graph.tensor(dim=[1, 16, 64], stride=[1024, 64, 1], name="x")
    up, gate = (graph.tensor(dim=[1, 64, 128], stride=[8192, 128, 1], name=f'{n} <&">') for n in ("up", "gate"))
    product = graph.matmul(x, gate)
    product.set_name("p<roduct")
    graph.mul(graph.swish(product), graph.matmul(x, up)).set_output(True).set_name("y")
    return graph


def test_a_drawing_has_every_operation_and_tensor_and_no_box_on_another(targeted):
    graph = gated()
    document = declare(graph).document
    picture = ElementTree.fromstring(drawing.svg(document, labels(graph)))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in picture.iter(f"{space}text")]
    assert {"matmul", "swish", "mul", "x", 'up <&">', 'gate <&">', "y", "p<roduct"} <= set(texts)
    assert texts.count("matmul") == 2
    boxes = [[float(box.get(name)) for name in ("x", "y", "width", "height")] for box in picture.iter(f"{space}rect")]
    assert len(boxes) == 8
    width, height = float(picture.get("width")), float(picture.get("height"))
    for number, (x, y, w, h) in enumerate(boxes):
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        for left, top, across, down in boxes[number + 1 :]:
            assert x + w <= left or left + across <= x or y + h <= top or top + down <= y
    assert len([path for path in picture.iter(f"{space}path") if path.get("class") == "edge"]) == 8


def test_dot_names_the_same_and_escapes_quotes(targeted):
    graph = gated()
    text = drawing.dot(declare(graph).document, labels(graph))
    assert text.startswith("digraph plan {")
    assert text.count("->") == 8
    assert 'label="up <&\\">\\n1×64×128 f16"' in text


def test_a_drawing_is_whole_whatever_its_tensors_are_called(targeted):
    graph, _ = graphs.matmul()
    evil = dict.fromkeys(labels(graph), "a\x1b[31m\x00\ud800")
    for draw in (drawing.svg, drawing.dot):
        draw(declare(graph).document, evil).encode()
    drawn = ElementTree.fromstring(drawing.svg(declare(graph).document, evil))
    assert any("a�[31m��" in (text.text or "") for text in drawn.iter("{http://www.w3.org/2000/svg}text"))


def test_show_draws_a_graph_in_a_file(warm, tmp_path):
    key = listed(warm, "--op", "conv")[0]["key"][:10]
    for ending, begin in (("svg", "<svg"), ("dot", "digraph")):
        assert "drawn in" in invoke("--dir", warm, "show", key, "--graph", tmp_path / f"conv.{ending}")
        assert (tmp_path / f"conv.{ending}").read_text().startswith(begin)
    assert "name it .svg or .dot" in invoke("--dir", warm, "show", key, "--graph", tmp_path / "conv.png", code=2)
    assert "cannot be written" in invoke("--dir", warm, "show", key, "--graph", tmp_path / "no" / "c.svg", code=1)
