"""Wiring: settings, the worker process, its setup, the embedded stack and the demo."""
