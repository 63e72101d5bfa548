"""How a child process of Python is begun: with what this one can import, and nothing of it before the standard library.

`PYTHONPATH` would put directories of user code first: a file `signal.py` beside a script would break the child.
"""

from __future__ import annotations

import json
import sys

_BEGIN = (
    "import json, runpy, sys; "
    "sys.path += [place for place in json.loads(sys.argv[2]) if place not in sys.path]; "
    "module = sys.argv[1]; "
    "sys.argv[1:] = sys.argv[3:]; "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a process that runs `module` as `python -m` does."""
    # -P: the working directory is no place for modules, unless it is one here.
    return [sys.executable, "-P", "-c", _BEGIN, module, json.dumps(sys.path), *arguments]
