"""Switches between two nodes joined by a slow link: relayed, and routed by the published rule."""
