"""Colours of the kinds of ops in pictures: the set of Okabe and Ito, which colour-blind people can tell apart."""

from __future__ import annotations

from optpipe.ops import Kind

FILL = {
    Kind.F: "#0072b2",  # blue
    Kind.B: "#e69f00",  # orange
    Kind.W: "#009e73",  # green
    Kind.BW: "#d55e00",  # vermilion
    Kind.C: "#cc79a7",  # purple
    Kind.O: "#56b4e9",  # sky
    Kind.R: "#f0e442",  # yellow
}
#: What text on the fill is written in.
INK = {kind: "#ffffff" if kind in (Kind.F, Kind.W, Kind.BW) else "#000000" for kind in Kind}
