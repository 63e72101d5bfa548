"""The drawings of the pages, as SVG files beside them: `python docs/generate.py` writes them.

Boxes have their own background, and what is between them a grey that can be read on white and on black: one file serves
both looks of the site and every other reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #14302c; text-anchor: middle }
  .small { font-size: 12px }
  .bold { font-weight: 600 }
  .mono { font-family: ui-monospace, monospace; font-size: 13px }
  .beside { fill: #76838f; font-size: 12px }
  .left { text-anchor: start }
  rect { rx: 6px; stroke-width: 1.5px }
  .step { fill: #dcecea; stroke: #4f8f87 }
  .good { fill: #cfe8cf; stroke: #4d8f4d }
  .work { fill: #f6e3c5; stroke: #b5853b }
  .none { fill: #e3e6ea; stroke: #8d99a5 }
  .frame { fill: none; stroke: #8d99a5; stroke-dasharray: 5 4 }
  path { fill: none; stroke: #76838f; stroke-width: 1.5px; marker-end: url(#head) }
  .back { stroke-dasharray: 4 3 }
"""


class Drawing:
    """Boxes, arrows and words, added one by one."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._title = title
        self._parts: list[str] = []

    def box(self, x: int, y: int, width: int, height: int, *lines: str, kind: str = "step") -> None:
        """A box with its left upper corner at x, y; the first line is bold."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" class="{kind}"/>')
        first = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            look = "bold" if number == 0 else "small"
            self.words(x + width / 2, first + 18 * number, line, look)

    def words(self, x: float, y: float, text: str, look: str = "beside") -> None:
        """Text with the middle (or with `left` its beginning) of its base line at x, y."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{look}">{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int], look: str = "") -> None:
        """A line through these points with a head at the end."""
        path = " L".join(f"{x} {y}" for x, y in points)
        self._parts.append(f'<path d="M{path}"{f" class={look!r}" if look else ""}/>'.replace("'", '"'))

    def __str__(self) -> str:
        width, height = self._size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
            f"<title>{escape(self._title)}</title>\n<style>{_STYLE}</style>\n"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" '
            'style="fill:#76838f;stroke:none;marker-end:none"/></marker></defs>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"


def lookup() -> Drawing:
    """What `PlanCache.build` does."""
    out = Drawing(720, 520, "What PlanCache.build does with a declared graph")
    out.box(40, 10, 260, 50, "a declared graph", "before validate()", kind="none")
    out.arrow((170, 60), (170, 90))
    out.box(40, 90, 260, 50, "key", "graph, device, environment, build")
    out.arrow((300, 115), (420, 115))
    out.words(360, 107, "has none")
    out.box(420, 90, 260, 50, "built, not cached", "bypassed", kind="work")
    out.arrow((170, 140), (170, 180))
    out.box(40, 180, 260, 66, "is there a record?", "the best route first; of each", "the directory, then its layers")
    out.arrow((300, 213), (420, 213))
    out.words(360, 205, "yes")
    out.box(
        420,
        180,
        260,
        66,
        "checked, then loaded",
        "SHA-256, key, driver, frontend;",
        "cuDNN takes 2 to 10 ms",
        kind="good",
    )
    out.arrow((550, 246), (550, 450))
    out.words(560, 350, "disk, layer", "beside left")
    out.arrow((170, 246), (170, 290))
    out.words(180, 272, "no, or it is of no use", "beside left")
    out.box(40, 290, 260, 50, "one process at a time", "the others wait for its plan")
    out.arrow((40, 315), (16, 315), (16, 213), (40, 213), look="back")
    out.words(60, 268, "look again")
    out.arrow((170, 340), (170, 375))
    out.box(40, 375, 260, 50, "cuDNN builds", "0.2 to 2 s", kind="work")
    out.arrow((170, 425), (170, 450))
    out.box(40, 450, 260, 60, "load it once, store it", "what cannot be loaded is not stored")
    out.arrow((300, 480), (420, 480))
    out.words(360, 472, "built")
    out.box(420, 450, 260, 60, "your graph, ready", "and an Outcome that says why", kind="good")
    return out


def key() -> Drawing:
    """The four parts of a key."""
    parts: Sequence[tuple[str, str, str]] = (
        ("graph", "operations, tensors,", "arguments, as declared"),
        ("device", "SM, shared memory,", "registers, name"),
        ("environment", "cuDNN, its engines,", "CUDA's major version"),
        ("build", "heuristics, policy,", "filters, explicit plan"),
    )
    out = Drawing(720, 240, "A key is made of four hashes")
    for number, (name, first, second) in enumerate(parts):
        x = 8 + 178 * number
        out.box(x, 10, 168, 74, name, first, second)
        out.arrow((x + 84, 84), (x + 84, 116))
        out.words(x + 92, 104, "SHA-256", "beside left")
        out.box(x, 116, 168, 32, ("3f0c…", "8239…", "0611…", "a85e…")[number], kind="none")
        out.arrow((x + 84, 148), (x + 84, 170), (360, 170), (360, 190))
    out.box(216, 190, 288, 42, "key", "8cbf0d948c960f9a…", kind="good")
    return out


def routes() -> Drawing:
    """Who makes plans of which route, and who takes them."""
    out = Drawing(720, 330, "The four routes: who makes their plans, and who takes them")
    out.words(110, 20, "made by")
    out.words(360, 20, "route")
    out.words(610, 20, "taken by")
    out.box(10, 40, 200, 110, "a process with a GPU", "builds with a handle", kind="none")
    out.box(10, 200, 200, 110, "target() or warm", "no GPU, no driver", kind="none")
    for number, (name, what) in enumerate(
        (
            ("tuned", "the fastest of all, measured"),
            ("native", "the heuristics' choice"),
            ("replay", "kernels + recipe"),
            ("deviceless", "other kernels, often slower"),
        )
    ):
        out.box(270, 34 + 74 * number, 180, 52, name, what, kind="work" if name == "deviceless" else "step")
    out.box(
        510, 40, 200, 150, "a process with a GPU", "tuned, else native,", "else replay, else it builds", kind="good"
    )
    out.box(510, 230, 200, 80, "target()", "deviceless, else replay", kind="good")
    out.arrow((210, 70), (270, 60))
    out.arrow((210, 120), (270, 134))
    out.arrow((210, 230), (270, 208))
    out.arrow((210, 275), (270, 282))
    out.arrow((450, 60), (510, 70))
    out.arrow((450, 134), (510, 116))
    out.arrow((450, 202), (510, 165))
    out.arrow((450, 218), (510, 250))
    out.arrow((450, 288), (510, 288))
    out.arrow((450, 274), (484, 274), (484, 210), (560, 210), (560, 190), look="back")
    out.words(360, 325, "- - only if asked for: PLANCACHE_AOT=serve, or the mode require-hit")
    return out


def layers() -> Drawing:
    """A writable directory and what lies under it."""
    out = Drawing(720, 230, "Layers: one writable directory, and what is only read under it")
    out.box(10, 80, 150, 60, "a job", "asks for a plan", kind="none")
    out.box(280, 10, 300, 56, "PLANCACHE_DIR", "read and written", kind="good")
    out.box(280, 86, 300, 56, "the team's directory", "PLANCACHE_LAYERS, read only")
    out.box(280, 162, 300, 56, "plans.bundle in the image", "PLANCACHE_LAYERS, read only")
    out.arrow((160, 95), (220, 95), (220, 30), (280, 30))
    out.words(248, 24, "1st")
    out.arrow((160, 110), (280, 110))
    out.words(248, 104, "2nd")
    out.arrow((160, 125), (220, 125), (220, 190), (280, 190))
    out.words(248, 184, "3rd")
    out.arrow((85, 80), (85, 46), (280, 46), look="back")
    out.words(120, 40, "what it builds")
    return out


DRAWINGS = {"key": key, "layers": layers, "lookup": lookup, "routes": routes}
