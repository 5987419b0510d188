"""Spawn-join generation: a pure state machine (`machine.py`) and the engines that feed it."""
