"""The chart of a plan as an SVG picture, for papers and slides: the same rows as on the page."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

import numpy as np

from optpipe import colours, draw
from optpipe.ops import Kind
from optpipe.page import view
from optpipe.plan import Plan
from optpipe.report import size_text

_GUTTER, _AXIS, _MARGIN, _LEGEND = 64.0, 18.0, 6.0, 20.0
_COMPUTE, _TRANSFER, _MEMORY, _HEAD, _SPACE = 18.0, 10.0, 26.0, 14.0, 6.0
_SMALLEST_LABEL = 5.2  # px a character
_BUBBLE, _DASHED = "#e4e6e9", 'stroke="#b3261e" stroke-dasharray="4 2"'
#: px between ops that follow each other, where they are wider than so many px.
_SEAM, _SEEN = 0.5, 3.0


def render(plan: Plan, width: int = 960, *, memory: bool = True) -> str:
    """The picture.

    Parameters
    ----------
    width
        Of the picture, in px; the height follows from the devices.
    memory
        With the memory curve of each device.

    Returns
    -------
    str
        An SVG document. All ops are drawn to scale; those wide enough carry their kind and microbatch.
    """
    return _Picture(view.of_plan(plan, "plan"), float(width), memory).text()


class _Picture:
    """One picture while it is drawn, from top to bottom."""

    def __init__(self, chart: dict[str, Any], width: float, memory: bool) -> None:
        self.chart, self.width, self.memory = chart, width, memory
        self.ops = chart["ops"]
        #: Which of its device's stages each stage is, from 0.
        self.chunk = {stage: n for device in chart["devices"] for n, stage in enumerate(device["stages"])}
        self.start, self.end = chart["start"], max(chart["end"], chart["start"] + 1e-9)
        self.y = _MARGIN
        self.parts: list[str] = []

    def text(self) -> str:
        """The document."""
        self._legend()
        self._axis()
        for device in self.chart["devices"]:
            self._device(device)
        if self.chart["shared"]:
            self._head("shared channels")
            for lane in self.chart["shared"]:
                self._lane(lane["name"], lane["ops"], _TRANSFER, shaded=False)
        height = self.y + _MARGIN
        title = f"{self.chart['facts'][0][1]}: schedule"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{height:g}" '
                f'viewBox="0 0 {self.width:g} {height:g}" font-family="sans-serif" font-size="9">',
                f"<title>{html.escape(title)}</title>",
                f'<rect width="{self.width:g}" height="{height:g}" fill="#ffffff"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )

    def x(self, time: float) -> float:
        """The place of a time (ms), px."""
        room = self.width - _GUTTER - _MARGIN
        return _GUTTER + (time - self.start) * room / (self.end - self.start)

    def _write(self, x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#1a1a1a") -> None:
        self.parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" fill="{fill}">{html.escape(text)}</text>'
        )

    def _legend(self) -> None:
        x = _GUTTER
        for kind in (Kind(k) for k in sorted(set(self.ops["kind"]))):
            self.parts.append(f'<rect x="{x:g}" y="{self.y:g}" width="12" height="10" fill="{colours.FILL[kind]}"/>')
            text = f"{kind.name} {draw.MEANING[kind]}"
            self._write(x + 15, self.y + 8.5, text)
            x += 26 + 5 * len(text)
        self.parts.append(f'<rect x="{x:g}" y="{self.y:g}" width="12" height="10" fill="{_BUBBLE}"/>')
        self._write(x + 15, self.y + 8.5, "bubble")
        x += 56
        if any(device["budget"] is not None for device in self.chart["devices"]) and self.memory:
            self.parts.append(f'<path d="M{x:g} {self.y + 5:g}h12" {_DASHED}/>')
            self._write(x + 15, self.y + 8.5, "budget")
            x += 56
        if max(self.chunk.values(), default=0):
            self._write(x, self.y + 8.5, "band on top: a later stage of its device")
        self.y += _LEGEND

    def _axis(self) -> None:
        span = self.end - self.start
        steps = [m * 10.0**e for e in range(-6, 13) for m in (1, 2, 5)]
        step = next((s for s in steps if s * (self.width - _GUTTER) / span >= 60), span)
        for number in range(int(np.ceil(self.start / step)), int(np.floor(self.end / step + 1e-9)) + 1):
            x = self.x(number * step)
            self._write(x, self.y + 8, f"{number * step:g}", anchor="middle", fill="#62676d")
            self.parts.append(f'<path d="M{x:.2f} {self.y + 11:g}v5" stroke="#9aa1a9"/>')
        self._write(_GUTTER - 16, self.y + 8, "ms", anchor="end", fill="#62676d")
        self.y += _AXIS

    def _head(self, text: str) -> None:
        self._write(2, self.y + 10, text)
        self.y += _HEAD

    def _device(self, device: dict[str, Any]) -> None:
        stages = ", ".join(map(str, device["stages"]))
        budget = "" if device["budget"] is None else f" of {size_text(device['budget'])}"
        self._head(
            f"{device['name']} (stage {stages}): busy {device['busy']:.0%}, peak {size_text(device['peak'])}{budget}"
        )
        for lane in device["lanes"]:
            compute = lane["name"] == "compute"
            self._lane(lane["name"], lane["ops"], _COMPUTE if compute else _TRANSFER, shaded=compute)
        if self.memory:
            self._curve(device)
        self.y += _SPACE

    def _lane(self, name: str, ops: list[int], height: float, *, shaded: bool) -> None:
        """Ops of one kind are one path; idle time is what is left of the grey ground."""
        self._write(_GUTTER - 4, self.y + height / 2 + 3, name[:12], anchor="end", fill="#62676d")
        if shaded:
            wide = self.width - _GUTTER - _MARGIN
            self.parts.append(
                f'<rect class="bubble" x="{_GUTTER:g}" y="{self.y:g}" width="{wide:g}" height="{height - 1:g}" '
                f'fill="{_BUBBLE}"/>'
            )
        for kind in (Kind(k) for k in sorted({self.ops["kind"][op] for op in ops})):
            own = [op for op in ops if self.ops["kind"][op] == kind]
            path = "".join(self._boxes(own, height - 1))
            self.parts.append(f'<path class="{kind.name}" fill="{colours.FILL[kind]}" d="{path}"/>')
            if shaded:
                self._later(own)
            for op in own:
                self._label(op, kind, height)
        self.y += height

    def _later(self, ops: list[int]) -> None:
        """A dark band on ops of the second stage of a device, thicker ones on the third and fourth."""
        for chunk in range(1, max(self.chunk.values(), default=0) + 1):
            own = [op for op in ops if self.chunk[self.ops["stage"][op]] == chunk]
            if own:
                path = "".join(self._boxes(own, min(1.5 * chunk, 4.5)))
                self.parts.append(f'<path class="later" fill="#000000" fill-opacity="0.6" d="{path}"/>')

    def _boxes(self, ops: list[int], height: float) -> Iterator[str]:
        for op in ops:
            left, right = self.x(self.ops["start"][op]), self.x(self.ops["end"][op])
            wide = right - left - (_SEAM if right - left > _SEEN else 0.0)
            yield f"M{left:.2f} {self.y:g}h{wide:.2f}v{height:g}h{-wide:.2f}z"

    def _label(self, op: int, kind: Kind, height: float) -> None:
        left, right = self.x(self.ops["start"][op]), self.x(self.ops["end"][op])
        text = f"{kind.name}{self.ops['microbatch'][op]}"
        for shown in (text, kind.name):
            if len(shown) * _SMALLEST_LABEL <= right - left - 1:
                y = self.y + height / 2 + 2.6
                self._write((left + right) / 2, y, shown, anchor="middle", fill=colours.INK[kind])
                return

    def _curve(self, device: dict[str, Any]) -> None:
        """The level over time, filled, and the budget as a dashed line."""
        full = max(device["budget"] or 0, device["peak"], 1)
        bottom, tall = self.y + _MEMORY - 2, _MEMORY - 5
        path, last = [f"M{_GUTTER:g} {bottom:g}"], bottom
        for time, level in zip(device["memory"]["time"], device["memory"]["bytes"], strict=True):
            y = bottom - tall * level / full
            path.append(f"H{self.x(time):.2f}V{y:.2f}")
            last = y
        path.append(f"V{last:.2f}H{self.width - _MARGIN:g}V{bottom:g}z")
        self.parts.append(f'<path class="memory" d="{"".join(path)}" fill="#b8c0c8"/>')
        self._write(_GUTTER - 4, bottom - tall / 2 + 3, "memory", anchor="end", fill="#62676d")
        if device["budget"] is not None:
            y = bottom - tall * device["budget"] / full
            self.parts.append(f'<path class="budget" d="M{_GUTTER:g} {y:.2f}H{self.width - _MARGIN:g}" {_DASHED}/>')
        self.y += _MEMORY
