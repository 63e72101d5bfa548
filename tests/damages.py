"""What happens to files: overwritten and cut short, in many ways."""

import os
import random
import subprocess
import sys

PAGE = 8192


def overwrite(file, start, content):
    """Write into a file as another program would: in a process of its own, as this one may have it open."""
    source = "import sys; f = open(sys.argv[1], 'r+b'); f.seek(int(sys.argv[2])); f.write(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-c", source, str(file), str(start)], input=content, check=True)


def noise(length, seed=1):
    return random.Random(seed).randbytes(length)


def in_the_middle(file):
    size = file.stat().st_size
    overwrite(file, size // 4, noise(size // 2))


def everywhere(file):
    overwrite(file, 0, noise(file.stat().st_size))


def in_the_header(file):
    overwrite(file, 0, noise(100))


def in_the_schema(file):
    overwrite(file, 100, noise(PAGE - 100))


def cut_short(file):
    os.truncate(file, file.stat().st_size // 2)


def cut_to_one_page(file):
    os.truncate(file, PAGE)


def cut_within_a_page(file):
    os.truncate(file, 3 * PAGE + 100)


def to_zero_length(file):
    os.truncate(file, 0)


DAMAGES = [
    in_the_middle,
    everywhere,
    in_the_header,
    in_the_schema,
    cut_short,
    cut_to_one_page,
    cut_within_a_page,
    to_zero_length,
]
