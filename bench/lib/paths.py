"""The shipped model, and the repository that has it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "demo" / "target"
