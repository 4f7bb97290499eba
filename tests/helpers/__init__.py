"""What tests share. ROOT is the repository, GOLDEN the recorded results of another's run."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
